"""Hypothesis makes DLPack descriptions of every kind, and the exchange layer reads them or refuses.

What is to be accepted, and as what, is computed again here from the description alone, in unbounded integers.
``DDP_MP_FUZZ=<minutes>`` goes on for so long, by other seeds in every run; otherwise some thousand descriptions, the same
in every run.  The long form keeps the case under way in ``build/exchange-case``: a crash leaves it there.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import itertools
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kit.dlpack import BFLOAT, FLOAT, TENSOR_FROM_OBJECT, DLTensor, described_as, describing, table_type
from kit.inside import _C

MINUTES = float(os.environ.get("DDP_MP_FUZZ", "0"))
UNDER_WAY = Path(__file__).parents[2] / "build" / "exchange-case"

NUMEL = 6
TYPES = {
    (FLOAT, 64, 1): torch.float64,
    (FLOAT, 32, 1): torch.float32,
    (BFLOAT, 16, 1): torch.bfloat16,
    (FLOAT, 16, 1): torch.float16,
}
#: Every operand whose values are read or written lies in here.
MEMORY = ctypes.create_string_buffer(512)
START = (ctypes.addressof(MEMORY) + 63) & ~63
INSIDE = START - ctypes.addressof(MEMORY)
FILLING = b"\x3c"  # a finite number in every type


@dataclasses.dataclass(frozen=True)
class Case:
    """One description."""

    fails: bool  # the table does not describe it
    data: int | None
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    ndim: int | None  # None: as many as there are sizes
    dtype: tuple[int, int, int]
    device: tuple[int, int]
    byte_offset: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.shape or ())[: self.ndim]


# --- what is due ----------------------------------------------------------------------------------------------------------


def is_accepted(case: Case) -> bool:
    """Whether a reader has to take the description."""
    if case.fails:
        return False
    ndim = len(case.shape or ()) if case.ndim is None else case.ndim
    if not 0 <= ndim <= 32 or (ndim > 0 and case.shape is None) or any(size < 0 for size in case.sizes):
        return False
    numel, element = math.prod(case.sizes), -(-case.dtype[1] * case.dtype[2] // 8)
    if max(numel, numel * element) >= 2**63 or (numel and not case.data):
        return False
    address = case.data + case.byte_offset if case.data else 0
    known = TYPES.get(case.dtype)
    return address < 2**64 and not (known and numel and address % known.itemsize)


def strides_of(case: Case) -> list[int]:
    """Those given; where none are, or nobody steps along them, those of row-major order."""
    strides: list[int] = []
    for i in reversed(range(len(case.sizes))):
        if case.strides is not None and case.sizes[i] != 1:
            strides.insert(0, case.strides[i])
            continue
        span = strides[0] * max(case.sizes[i + 1], 1) if strides else 1
        strides.insert(0, span if -(2**63) <= span < 2**63 else 1)
    return strides


def is_dense(sizes: tuple[int, ...], strides: list[int]) -> bool:
    """Every place from the first to the last belongs to one element."""
    if math.prod(sizes) <= 1:
        return True
    steps = [(stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1]
    if math.prod(sizes) <= 64:
        places = (sum(p) for p in itertools.product(*([k * stride for k in range(size)] for stride, size in steps)))
        return sorted(places) == list(range(math.prod(sizes)))
    spans = itertools.accumulate((size for _, size in sorted(steps)), lambda a, b: a * b, initial=1)
    return all(stride == span for (stride, _), span in zip(sorted(steps), spans, strict=False))


def facts_of(case: Case) -> dict[str, Any]:
    strides = strides_of(case)
    return {
        "data": case.data + case.byte_offset if case.data else 0,
        "numel": math.prod(case.sizes),
        "dtype": str(TYPES[case.dtype]).removeprefix("torch.") if case.dtype in TYPES else "none",
        "dense": is_dense(case.sizes, strides),
        "device_type": case.device[0],
        "device_index": case.device[1],
        "shape": case.sizes,
        "strides": tuple(strides),
    }


def is_operand(case: Case) -> bool:
    """Whether the engine can copy to or from it, beside a dense host tensor of NUMEL elements in one dimension."""
    if not is_accepted(case):
        return False
    facts = facts_of(case)
    # the same shape needs the same strides, and a dense one of one dimension has them
    return bool(facts["dtype"] != "none" and facts["dense"] and facts["numel"] == NUMEL and case.device == (1, 0))


# --- descriptions ---------------------------------------------------------------------------------------------------------

int32, int64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
uint8, uint32, uint64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
sizes = st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**63)]) | int64
shapes = (
    st.lists(st.integers(0, 4), max_size=5)
    | st.lists(sizes, max_size=5)
    | st.lists(st.integers(0, 2), min_size=30, max_size=36)
)


#: Sizes that are refused, although their product, as far as 64 bits hold it, would do.
NEARLY = [[-6], [-2, -3], [-1, 0], [2**32, 2**32], [2**33, 2**31, 3], [2**62], [2**62, 2, 2], [2**63 - 1]]


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """A shape, strides of the same length, and a number of dimensions that does not lead behind their end."""
    shape = tuple(draw(st.sampled_from([[6], [2, 3], [1, 6], [3, 1, 2]]) | shapes | st.sampled_from(NEARLY)))
    kind = draw(st.sampled_from(["none", "dense", "dense", "any"]))
    strides: list[int] | None = None
    if kind == "dense":
        strides, span = [0] * len(shape), 1
        for i in draw(st.permutations(range(len(shape)))):
            strides[i], span = max(min(span, 2**63 - 1), -(2**63)), span * shape[i]
    elif kind == "any":
        strides = [draw(st.integers(-4, 24) | int64) for _ in shape]
    outside = st.integers(-(2**31), -1) | st.integers(33, 2**31 - 1)
    ndim = draw(st.none() | st.none() | st.integers(0, len(shape)) | outside)
    gone = draw(st.integers(0, 15)) == 0
    return {"shape": None if gone else shape, "strides": None if strides is None else tuple(strides), "ndim": ndim}


#: What each part may be; the first of a part is what is mostly right.
PARTS: dict[str, list[st.SearchStrategy[Any]]] = {
    "fails": [st.just(False), st.just(True)],
    "data": [st.just(START), st.none(), st.just(START + 1), uint64],
    "dtype": [
        st.sampled_from(sorted(TYPES)),
        st.tuples(uint8, uint8, st.integers(0, 65535)),
        st.sampled_from([(code, bits, lanes) for code, bits, _ in TYPES for lanes in (0, 2)]),
    ],
    "device": [st.just((1, 0)), st.tuples(st.integers(0, 20), st.integers(-1, 3)), st.tuples(int32, int32)],
    "byte_offset": [st.sampled_from([0, 0, 8, 64]), st.integers(0, 80), uint64],
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Right in most parts, so that each part that is wrong is seen alone too."""
    wrong = draw(st.integers(0, 3).flatmap(lambda n: st.sets(st.sampled_from(sorted(PARTS)), max_size=n)))
    parts = {name: draw(st.one_of(kinds[1:]) if name in wrong else kinds[0]) for name, kinds in PARTS.items()}
    return Case(**draw(layouts()), **parts)


# --- objects that hand them over ------------------------------------------------------------------------------------------


class Given:
    """What the objects under way hand over, by identity: an exchange table is that of a type, for all its objects."""

    tensors: dict[int, DLTensor] = {}  # noqa: RUF012 - emptied by every case


@TENSOR_FROM_OBJECT
def describe_given(given: object, out: Any) -> int:
    tensor = Given.tensors.get(id(given))
    if tensor is None:
        return -1
    out[0] = tensor
    return 0


Foreign = table_type(describing(describe_given))


class Handed:
    """An object of a case."""

    def __init__(self, case: Case) -> None:
        fields = dataclasses.asdict(case)
        del fields["fails"]
        self.tensor, self.kept = described_as(**fields)
        self.object = Foreign()
        Given.tensors = {} if case.fails else {id(self.object): self.tensor}
        self.before = self.references()

    def references(self) -> int:
        return sys.getrefcount(self.object)

    def check(self) -> None:
        """Nobody keeps what was given."""
        assert self.references() == self.before


def attempt(act: Any, *arguments: Any) -> Any:
    """What ``act(*arguments)`` returns, or the refusal that it raises: of a kind that is documented, and with a text."""
    try:
        return act(*arguments)
    except (BufferError, TypeError, ValueError) as error:
        refusal = error
        error.__traceback__ = None  # its frames refer to the object
    assert str(refusal)
    return refusal


# --- what reads them ------------------------------------------------------------------------------------------------------


def read(case: Case) -> bool:
    handed = Handed(case)
    result = attempt(_C.describe, handed.object)
    handed.check()
    assert isinstance(result, dict) is is_accepted(case), result
    if isinstance(result, dict):
        assert result == facts_of(case)
        return True
    assert type(result) is BufferError
    return False


def is_in_memory(case: Case) -> bool:
    """Or such that nobody touches its memory."""
    address = (case.data or 0) + case.byte_offset
    return not is_operand(case) or START <= address <= START + 512 - 64 - NUMEL * 8


def values_at(case: Case) -> torch.Tensor:
    dtype, offset = TYPES[case.dtype], INSIDE + (case.data or 0) + case.byte_offset - START
    return torch.frombuffer(MEMORY, dtype=dtype, offset=offset, count=NUMEL)


def copy(case: Case, into: bool, by_fuse: bool) -> bool:
    """A cast from the description, or into it."""
    if not is_in_memory(case):
        return False
    MEMORY.raw = FILLING * len(MEMORY)
    handed, other = Handed(case), torch.full((NUMEL,), 2.0)
    pair = (other, handed.object) if into else (handed.object, other)
    result = attempt(_C.fuse, [pair[0]], [None], [pair[1]], 1.0) if by_fuse else attempt(_C.cast, *pair)
    del pair
    handed.check()
    assert (result is None) is is_operand(case), result
    if result is not None:
        assert MEMORY.raw == FILLING * len(MEMORY)
        assert other.tolist() == [2.0] * NUMEL
        return False
    if into:
        assert values_at(case).tolist() == [2.0] * NUMEL
        nbytes = NUMEL * TYPES[case.dtype].itemsize
        assert MEMORY.raw.count(FILLING) >= len(MEMORY) - nbytes
    else:
        assert torch.equal(other, values_at(case).float())
    return True


def add(case: Case) -> bool:
    """The second summand of a multi-tensor operation."""
    if not is_in_memory(case):
        return False
    MEMORY.raw = FILLING * len(MEMORY)
    handed, ones, out = Handed(case), torch.ones(NUMEL), torch.full((NUMEL,), 2.0)
    result = attempt(_C.fuse, [ones], [handed.object], [out], 2.0)
    handed.check()
    assert (result is None) is is_operand(case), result
    assert result is not None or torch.equal(out, (1 + values_at(case).float()) / 2)
    return result is None


def bind(case: Case, which: int) -> bool:
    """A master, a copy or an arena of an engine that has others before and afterwards."""
    weight = torch.nn.Parameter(torch.arange(float(NUMEL)))
    home = {"weight": weight}
    engine = _C.Engine([weight], ["weight"], [(home, "weight", 0)], "bfloat16", 1024, 1024)
    arena = torch.empty(engine.buckets[0][2], dtype=torch.uint8)
    right = [[weight.data], [arena[: 2 * NUMEL].view(torch.bfloat16)], [arena]]
    engine.bind(*right)
    handed = Handed(case)
    parts = [list(part) for part in right]
    parts[which] = [handed.object]
    result = attempt(engine.bind, *parts)
    if result is None:
        facts = facts_of(case)
        assert is_accepted(case)
        assert facts["dense"]
        assert facts["numel"] == NUMEL or which == 2
        assert case.device == (1, 0)
        assert which == 0 or facts["data"] in (right[1][0].data_ptr(), arena.data_ptr())
    del parts
    engine.bind(*right)
    handed.check()
    assert engine.begin() == _C.UNCHANGED
    engine.wait()
    assert weight.dtype is torch.bfloat16
    assert weight.tolist() == list(range(NUMEL))
    engine.restore()
    assert weight.dtype is torch.float32
    return result is None


READERS: dict[str, Any] = {
    "describe": read,
    "cast from": lambda case: copy(case, into=False, by_fuse=False),
    "cast into": lambda case: copy(case, into=True, by_fuse=False),
    "fuse from": lambda case: copy(case, into=False, by_fuse=True),
    "fuse into": lambda case: copy(case, into=True, by_fuse=True),
    "fuse add": add,
    "bind master": lambda case: bind(case, 0),
    "bind copy": lambda case: bind(case, 1),
    "bind arena": lambda case: bind(case, 2),
}


def settled(**more: Any) -> settings:
    return settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), **more)


def run(counts: collections.Counter[tuple[str, bool]], note: int | None = None, **more: Any) -> None:
    """Draws and tries so many descriptions; counts what was accepted and what was not."""

    @settled(**more)
    @given(st.sampled_from(["describe", *READERS]), cases())
    def try_one(reader: str, case: Case) -> None:
        if note is not None:
            os.pwrite(note, f"{reader}: {case}\n".ljust(3000).encode(), 0)  # a file made anew each time takes milliseconds
        counts[reader, READERS[reader](case)] += 1

    try_one()


@pytest.mark.long
@pytest.mark.timeout(60 * MINUTES + 300)
def test_exchange_any_description_is_read_as_it_is_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    if not MINUTES:
        run(counts, max_examples=1600, derandomize=True)
    else:
        UNDER_WAY.parent.mkdir(exist_ok=True)
        note = os.open(UNDER_WAY, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        end = time.monotonic() + 60 * MINUTES
        try:
            while time.monotonic() < end:
                run(counts, note, max_examples=500, phases=(Phase.generate, Phase.shrink))
            UNDER_WAY.unlink()
        finally:
            os.close(note)
            with capsys.disabled():
                print(
                    f"\n{counts.total()} descriptions, {sum(n for (_, taken), n in counts.items() if taken)} of them accepted"
                )
    for reader in () if MINUTES else READERS:  # the short form, which is the same in every run, sees both
        assert counts[reader, False] > 0, reader
    for kind in ("describe", "cast", "fuse"):
        assert MINUTES or sum(n for (reader, taken), n in counts.items() if taken and reader.startswith(kind)) > 0, kind
