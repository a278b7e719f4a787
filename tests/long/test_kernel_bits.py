"""The kernel against PyTorch, bit for bit: `Tensor.to` of many patterns of every pair of types, and sums and quotients.

The PTX of every architecture runs on the simulated driver; texts that differ in nothing but the name run once.  2^20 patterns
a pair unless DDP_MP_PATTERNS says another power of two:

    DDP_MP_PATTERNS=24 pytest -s tests/long/test_kernel_bits.py      prints how many there were; some minutes

What 16 bits hold is tried whole, again and again in other places.  Of float32 every upper half is tried with lower halves
around every point where rounding turns, and random ones; of float64 values beside all these, and any bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kit.kernel_image import kernel_image
from kit.kernel_rows import NAMES, NONE, SCALINGS, SIZES, Scaling, Table
from kit.simulated import require_simulator

TYPES = tuple(getattr(torch, name) for name in NAMES)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int16)  # of the same sizes
F64, F32, BF16, F16 = range(4)
PATTERNS = 1 << int(os.environ.get("DDP_MP_PATTERNS", "20"))
PASS = 1 << 20  # patterns in one launch
PAIRS = [(src, dst) for src in range(4) for dst in range(4)]

#: Lower halves of float32 where rounding to 16 bits turns: at bit 16 (bfloat16), at bit 13 (float16) and, where float16 is
#: subnormal, at any bit.  The first are the most important.
LOWER = np.array(
    list(
        dict.fromkeys(
            [0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x2FFF, 0x3000, 0x3001]
            + [(step + beside) & 0xFFFF for step in range(0, 1 << 16, 1 << 12) for beside in (-1, 0, 1)]
            + [((1 << bit) + beside) & 0xFFFF for bit in range(16) for beside in (-1, 0, 1)]
        )
    ),
    np.uint32,
)


@pytest.fixture(scope="module")
def texts() -> dict[int, bytes]:
    """The different texts of the kernel, by the first architecture that each is for."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    from cuda_mutants import architectures_of

    require_simulator()
    found = architectures_of(kernel_image().read_bytes())
    return {architectures[0]: text.encode() + b"\0" for text, architectures in found.items()}


def float32_bits(number: int, make: np.random.Generator) -> np.ndarray:
    """2^20 patterns: every upper half 16 times, with the lower halves of this pass."""
    lower = LOWER[number * 16 : number * 16 + 16]
    chosen = make.integers(0, 1 << 16, (1 << 16, 16), np.uint32)
    chosen[:, : min(len(lower), 12 if number == 0 else 16)] = lower[: 12 if number == 0 else 16]
    return ((np.arange(1 << 16, dtype=np.uint32)[:, None] << 16) | chosen).ravel()


def float64_bits(number: int, make: np.random.Generator) -> np.ndarray:
    """2^20 patterns: any bits, and what lies on, beside and between those of float32."""
    narrow = float32_bits(number, make)
    with np.errstate(invalid="ignore", over="ignore"):
        single = narrow.view(np.float32)
        between = (single.astype(np.float64) + (narrow + np.uint32(1)).view(np.float32).astype(np.float64)) / 2
        wide = np.where(make.random(PASS) < 0.5, single.astype(np.float64), between)
    beside = (wide.view(np.int64) + make.integers(-1, 2, PASS)).view(np.uint64)
    return np.where(make.random(PASS) < 0.25, make.integers(0, 1 << 64, PASS, np.uint64), beside)


def patterns(type_: int, number: int) -> np.ndarray:
    """Bytes of 2^20 patterns, in an order by chance."""
    make = np.random.default_rng([type_, number])
    if type_ == F64:
        bits = float64_bits(number, make)
    elif type_ == F32:
        bits = float32_bits(number, make)
    else:
        bits = np.tile(np.arange(1 << 16, dtype=np.uint16), PASS >> 16)
    return make.permutation(bits).view(np.uint8)


def lengths(total: int, number: int) -> Iterator[tuple[int, int]]:
    """Parts of the patterns: rows of several chunks and of few elements."""
    begin, i = 0, number
    while begin < total:
        length = min(total - begin, (20_011, 4099, 9, 1030, 16_384)[i % 5])
        yield begin, length
        begin, i = begin + length, i + 1


def same_bits(got: torch.Tensor, want: torch.Tensor, type_: int) -> torch.Tensor:
    """Where they are equal, any NaN to any other."""
    whole = WHOLE[type_]
    return (got.view(whole) == want.view(whole)) | (got.isnan() & want.isnan())


def require_bits(table: Table, memory: np.ndarray, wanted: torch.Tensor, what: str) -> None:
    """The rows' destinations, one after another, hold what is wanted."""
    after = torch.from_numpy(memory)
    begin = 0
    for src, add, dst, *_, at, numel in table.rows:
        got = after[at : at + numel * SIZES[dst]].view(TYPES[dst])
        want = wanted[begin : begin + numel]
        wrong = (~same_bits(got, want, dst)).nonzero()
        first = int(wrong[0]) if len(wrong) else 0
        assert not len(wrong), f"{what}: {len(wrong)} differ, the first {got[first]}, due {want[first]} ({src, add, dst})"
        begin += numel
    assert begin == len(wanted)


def table_of(types: tuple[int, int, int], contents: tuple[np.ndarray, np.ndarray], number: int) -> Table:
    """All patterns as rows that begin anywhere."""
    src, add, _ = types
    table = Table()
    total = max(len(c) // SIZES[t] for c, t in zip(contents, (src, add), strict=True) if t != NONE)
    for i, (begin, numel) in enumerate(lengths(total, number)):
        parts = [
            c[begin * SIZES[t] : (begin + numel) * SIZES[t]] if t != NONE else c
            for c, t in zip(contents, (src, add), strict=True)
        ]
        table.add(types, (numel, i % 8, (i // 8) % 3, (i // 5) % 3), parts)
    table.settle()
    return table


NOTHING = np.zeros(0, np.uint8)


@pytest.mark.long
@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda type_: NAMES[type_])
def test_kernel_bits_equal_to(texts: dict[int, bytes], src: int, dst: int) -> None:
    tried = 0
    for number in range(max(1, PATTERNS // PASS)):
        content = patterns(src, number)
        table = table_of((src, NONE, dst), (content, NOTHING), number)
        wanted = torch.from_numpy(content).view(TYPES[src]).to(TYPES[dst])
        for capability, text in texts.items():
            (memory,) = table.run(text, capability, SCALINGS[:1])
            require_bits(table, memory, wanted, f"{NAMES[src]} to {NAMES[dst]} on sm_{capability}")
        tried += len(wanted)
    print(f"{NAMES[src]} to {NAMES[dst]}: {tried} patterns equal on sm_{', sm_'.join(map(str, texts))}")


def in_pytorch(src: torch.Tensor | None, add: torch.Tensor | None, dst: int, divisor: float) -> torch.Tensor:
    """The formula of csrc/core/row.h, operation by operation."""
    given = [t for t in (src, add) if t is not None]
    wide = torch.float64 if dst == F64 or any(t.dtype is torch.float64 for t in given) else torch.float32
    value = torch.zeros(len(given[0]), dtype=wide) if src is None else src.to(wide)
    value = value if add is None else value + add.to(wide)
    value = value if divisor == 1 else value / divisor
    return value.to(torch.float32).to(TYPES[dst]) if dst in (BF16, F16) else value.to(TYPES[dst])


#: Everything with something to add, and everything that is scaled.
SUMS = [(src, add) for src in (*range(4), NONE) for add in (*range(4), NONE) if (src, add) != (NONE, NONE)]


def sum_name(types: tuple[int, int]) -> str:
    return "+".join("none" if type_ == NONE else NAMES[type_] for type_ in types)


@pytest.mark.long
@pytest.mark.parametrize("types", SUMS, ids=sum_name)
def test_kernel_sums_and_quotients_equal_pytorch(texts: dict[int, bytes], types: tuple[int, int]) -> None:
    src, add = types
    count = PATTERNS >> 6
    tried = 0
    for dst in range(4):
        for number in range(max(1, count // PASS)):
            contents = [
                NOTHING if type_ == NONE else patterns(type_, number + 100 * i)[: min(count, PASS) * SIZES[type_]]
                for i, type_ in enumerate(types)
            ]
            table = table_of((src, add, dst), (contents[0], contents[1]), number)
            tensors = [
                None if type_ == NONE else torch.from_numpy(c).view(TYPES[type_])
                for type_, c in zip(types, contents, strict=True)
            ]
            for capability, text in texts.items():
                for memory, (divisor, *_) in zip(table.run(text, capability), SCALINGS, strict=True):
                    wanted = in_pytorch(tensors[0], tensors[1], dst, divisor)
                    require_bits(table, memory, wanted, f"/ {divisor} to {NAMES[dst]} on sm_{capability}")
            tried += len(SCALINGS) * min(count, PASS)
    print(f"({sum_name(types)}) / divisor: {tried} results equal on sm_{', sm_'.join(map(str, texts))}")


@pytest.mark.parametrize("add", [*range(4), NONE], ids=lambda t: "none" if t == NONE else NAMES[t])
def test_kernel_zeros_without_a_source_have_no_sign(texts: dict[int, bytes], add: int) -> None:
    """No source counts as +0, whose sum with -0 is +0, whatever the rows around hold; divided by -1 it is -0."""
    minus = [torch.full((40,), -0.0, dtype=type_) for type_ in TYPES]
    table = Table()
    for dst in range(4):
        content = NOTHING if add == NONE else minus[add].view(torch.uint8).numpy()
        table.add((NONE, add, dst), (40, 3, 0, 1), (NOTHING, content))
    table.settle()
    scalings: list[Scaling] = [(1.0, 1.0, 0), (-1.0, -1.0, 1), (3.0, 3.0, 2), (-3.0, -3.0, 2)]
    for capability, text in texts.items():
        for memory, (divisor, *_) in zip(table.run(text, capability, scalings), scalings, strict=True):
            after = torch.from_numpy(memory)
            for *_, dst, _, _, at, numel in table.rows:
                got = after[at : at + numel * SIZES[dst]].view(TYPES[dst])
                assert not got.any()
                assert bool((got.signbit() == (divisor < 0)).all()), (NAMES[dst], divisor, capability)
