"""The kernel over every kind of row, against the host backend; and that scripts/mutate_cuda.py still works.

The whole mutation run is `make mutate`: it takes long and is no part of the tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.inside import _C
from kit.kernel_image import kernel_image
from kit.kernel_rows import NAMES, NONE, SCALINGS, SIZES, Rows
from kit.simulated import require_simulator

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutate_cuda.py"
sys.path.insert(0, str(SCRIPT.parent))


@pytest.fixture(scope="module")
def image() -> bytes:
    """The kernel image, made from the sources as they are now."""
    require_simulator()
    return kernel_image().read_bytes()


def by_the_host(rows: Rows, divisor: float) -> np.ndarray:
    """The memory after the host backend did the same."""
    rows.memory[:] = rows.initial
    memory = torch.from_numpy(rows.memory)

    def view(type_: int, offset: int, numel: int) -> torch.Tensor | None:
        if type_ == NONE:
            return None
        return memory[offset : offset + numel * SIZES[type_]].view(getattr(torch, NAMES[type_]))

    lists: tuple[list[torch.Tensor | None], ...] = ([], [], [])
    for src, add, dst, *offsets, numel in rows.rows:
        for into, type_, offset in zip(lists, (src, add, dst), offsets, strict=True):
            into.append(view(type_, offset, numel))
    _C.fuse(lists[0], lists[1], lists[2], divisor)  # type: ignore[arg-type]
    return rows.memory.copy()


def equal_but_for_nan(rows: Rows, got: np.ndarray, want: np.ndarray) -> bool:
    """Bit for bit; a NaN is any NaN, as devices make only one."""
    a, b = torch.from_numpy(got.copy()), torch.from_numpy(want.copy())
    for _, _, dst, _, _, offset, numel in rows.rows:
        part = slice(offset, offset + numel * SIZES[dst])
        x, y = (t[part].view(getattr(torch, NAMES[dst])) for t in (a, b))
        both = x.isnan() & y.isnan()
        x[both] = y[both] = 0
    return torch.equal(a, b)


@pytest.mark.parametrize("capability", [75, 80, 90, 100, 120])
def test_kernel_rows_equal_the_host_backend_on_every_architecture(image: bytes, capability: int) -> None:
    from cuda_mutants import ptx_of

    rows = Rows()
    results = list(rows.run(ptx_of(image)[capability].encode() + b"\0", capability))
    for got, (divisor, _, _) in zip(results, SCALINGS, strict=True):
        assert equal_but_for_nan(rows, got, by_the_host(rows, divisor)), f"divisor {divisor}"
    assert min(rows.vectors) > 10_000  # most goes several words at a time


def test_mutation_script_finds_mutants_and_kills_some(image: bytes) -> None:
    from cuda_mutants import BACKEND, CALLERS, architectures_of, kind_of, mutants_of, ptx_mutants, sample_of

    for stem in (*BACKEND, *CALLERS):
        mutants = mutants_of(stem)
        assert mutants, stem
        original = (ROOT / "csrc" / f"{stem}.c").read_text()
        assert all(mutant.text != original for mutant in mutants)
        assert len({mutant.what for mutant in mutants}) == len(mutants)
    assert sum(len(mutants_of(stem)) for stem in BACKEND) > 60
    texts = architectures_of(image)
    assert sorted(a for architectures in texts.values() for a in architectures) == [75, 80, 90, 100, 120]
    for text, (first, *_) in texts.items():
        mutants = ptx_mutants(text, first)
        assert len(mutants) > 500
        assert {kind_of(mutant) for mutant in sample_of(mutants, 100)} == {kind_of(mutant) for mutant in mutants}


@pytest.mark.long
def test_mutation_script_judges_a_mutant_of_the_kernel(image: bytes) -> None:
    command = [sys.executable, str(SCRIPT), "--part", "ptx", "--architectures", "90", "--sample", "3", "--no-report"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert "Killed:" in done.stdout, done.stdout + done.stderr
    assert "killed " in done.stdout
