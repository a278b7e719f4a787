"""``python -m ddp_mp check``: it passes here, and says so when something is wrong."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from kit.inside import _C, LeafPool
from kit.ranks import Rank, on_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import ddp_mp
from ddp_mp.tools import check

ROOT = pathlib.Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.long
def test_check_of_this_machine_passes_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    temporary, elsewhere = tmp_path / "temporary", tmp_path / "elsewhere"
    temporary.mkdir()
    elsewhere.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    result = subprocess.run(
        [sys.executable, "-m", "ddp_mp", "check"], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert ddp_mp.__version__ in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["ok"] * 3
    assert lines[-1].startswith("Training with ddp_mp can be trusted on this machine")
    assert list(temporary.iterdir()) == list(elsewhere.iterdir()) == []


def wrong_in_one_bit(values: torch.Tensor, out: torch.Tensor) -> None:
    """A cast, but for the sign of one value in a thousand."""
    _C.cast(values, out)
    out[999::1000] *= -1


def test_check_finds_a_wrong_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    check.check_casts(CPU)
    monkeypatch.setattr(check, "_cast", wrong_in_one_bit)
    with pytest.raises(check.CheckError, match=r"torch\.float64 to torch\.float64: \d+ of \d+ values are wrong"):
        check.check_casts(CPU)


@pytest.mark.parametrize("isa", _C.build_info()["simd_available"])
def test_check_passes_on_every_instruction_set(isa: str) -> None:
    before = _C.host_isa()
    _C.host_set_isa(isa)
    try:
        check.check_casts(CPU)
    finally:
        _C.host_set_isa(before)


def test_check_values_reach_what_casts_get_wrong() -> None:
    for dtype in (torch.float32, torch.float64):
        values = check._values(dtype)
        assert values.isnan().any()
        assert values.isinf().any()
        assert ((values.abs() > 0) & (values.abs() < torch.finfo(dtype).tiny)).any()
        for narrow in (torch.bfloat16, torch.float16):
            widened = values.to(narrow).to(dtype)
            step = (torch.nextafter(values.to(narrow), torch.tensor(float("inf"), dtype=narrow)).to(dtype) - widened).abs()
            assert ((values - widened).abs() * 2 == step).any(), "halfway between two"
    assert len(check._values(torch.float16).view(torch.int16).unique()) == 2**16


def test_check_finds_a_wait_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    check.check_order(CPU)
    inline = _C.host_set_inline_bytes(123)
    monkeypatch.setattr(LeafPool, "wait", lambda self: None)
    with pytest.raises(check.CheckError, match=r"leaves should hold 1\.0 in bfloat16"):
        check.check_order(CPU)
    assert _C.host_set_inline_bytes(inline) == 123, "knobs are as they were"


def test_check_finds_an_event_that_comes_too_early() -> None:
    module = torch.nn.Linear(4, 4)  # cast at once, not by the worker that is held up
    pool = LeafPool(check.managed_parameters(module, set()), torch.bfloat16, ddp_mp.Options())
    with torch.no_grad(), pytest.raises(check.CheckError, match="counts as done before it has run"):
        check._require_order(module, pool, CPU, 1.0)
    time.sleep(0.1)  # the worker is let go


@on_ranks(2)
def test_check_of_gradients_passes(rank: Rank) -> None:
    assert check.train_exactly(rank.index, CPU) == []


@on_ranks(2)
def test_check_finds_wrong_gradients_and_missing_casts(rank: Rank) -> None:
    patch = ddp_mp.patching.patch

    def doubling(state, bucket):  # no annotations: register_comm_hook compares them
        bucket.set_buffer(bucket.buffer() * 2)
        return default_hooks.allreduce_hook(state, bucket)

    def patched_with_a_wrong_hook(ddp: Any, **how: Any) -> None:
        patch(ddp, **how)
        ddp.register_comm_hook(None, doubling)

    for fault, due in (
        (patched_with_a_wrong_hook, "step 1 in torch.bfloat16: the gradient of a.weight differs"),
        (lambda ddp, **how: None, "the forward computed in torch.float32, not in torch.bfloat16"),
        (lambda ddp, mixed_precision, options: patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.float16)), "not in"),
    ):
        ddp_mp.patching.patch = fault  # type: ignore[assignment]
        try:
            found = check.train_exactly(rank.index, CPU)
        finally:
            ddp_mp.patching.patch = patch
        assert found, due
        assert due in found[0], found


def fails(rank: int, place: torch.device) -> list[str]:
    """Finds something on one rank, and raises on the other."""
    if rank:
        raise ZeroDivisionError("rank 1 has had enough")
    return ["one and one is three"]


def dies(rank: int, place: torch.device) -> list[str]:
    """Ends the process."""
    os._exit(3)


@pytest.mark.long
def test_check_says_what_processes_found_or_that_they_gave_no_answer() -> None:
    first, second = check.two_processes(fails, CPU)
    assert first == "rank 0: one and one is three"
    assert second.startswith("rank 1: Traceback")
    assert "rank 1 has had enough" in second
    assert check.two_processes(dies, CPU) == [f"rank {rank} ended without an answer" for rank in range(2)]
    assert check.two_processes(fails, CPU, seconds=0.0) == [f"rank {rank} gave no answer in 0 s" for rank in range(2)]


def test_check_that_fails_is_said_in_plain_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(place: torch.device) -> str:
        raise check.CheckError("one and one is three")

    def broken(place: torch.device) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(check, "check_casts", wrong)
    monkeypatch.setattr(check, "check_order", broken)
    monkeypatch.setattr(check, "check_gradients", lambda place: "fine")
    monkeypatch.setattr(check, "_cuda_devices", lambda: 0)
    assert check.main([]) == 1
    output = capsys.readouterr().out
    assert "FAILED  CPU: casts: one and one is three" in output
    assert "FAILED  CPU: order: an error\nTraceback" in output
    assert "ok      CPU: gradients: fine" in output
    assert output.endswith("Do not trust training with ddp_mp on this machine: checks that failed: 2.\n")
    for name in ("check_casts", "check_order"):
        monkeypatch.setattr(check, name, lambda place: "fine")
    assert check.main([]) == 0
    assert "CUDA: not checked" in capsys.readouterr().out
