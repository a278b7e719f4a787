"""What the package says by the ``logging`` module, and when it says nothing."""

from __future__ import annotations

import logging

import pytest
import torch
from kit.inside import _C
from kit.logs import logged
from kit.modules import Two, mlp, vectors
from kit.oracle import BF16, F32, Trial, mean_square, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


@on_ranks(2)
def test_log_of_a_patch_sums_up_the_plan(rank: Rank) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with logged() as messages:
        ddp_mp.patch(ddp, mixed_precision=MIXED, options=ddp_mp.Options(full_precision_modules=(nn.LayerNorm,)))
        (line,) = messages
        for part in (
            "INFO patched Sequential: 2 of 4 parameters cast to torch.bfloat16",
            "1 on cpu by the host backend (",
            "gradients reduced in torch.float32 in 1 buckets over 2 ranks",
            "1 modules in full precision",
            "LayerNorm",
        ):
            assert part in line, line
        ddp_mp.unpatch(ddp)
    assert messages[1:] == ["INFO unpatched Sequential; it has no mixed precision again"]


@on_ranks(2)
def test_log_names_what_is_left_to_pytorch(rank: Rank) -> None:
    model = nn.Sequential(nn.Embedding(5, 8, sparse=True), nn.Linear(8, 8))
    model[1].weight.data = torch.randn(16, 16)[::2, ::2]
    with logged() as messages:
        ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED)
    assert [m for m in messages if "cast by PyTorch" in m and "1.weight" in m]
    assert [m for m in messages if "reduced one by one" in m and "0.weight" in m]


@on_ranks(2)
def test_log_of_a_rebuilt_plan_says_why(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    frozen = Trial(rank, mlp().requires_grad_(False).append(nn.Linear(8, 8)))
    with logged() as messages:
        trial.module[0].weight = nn.Parameter(torch.randn(8, 8))
        trial.ddp(torch.randn(4, 8))
        frozen.module[0].requires_grad_(True)
        frozen.ddp(torch.randn(4, 8))
    first, second = (m for m in messages if m.startswith("INFO plan built anew"))
    assert "as parameters were replaced, for Sequential" in first
    assert "as parameters require grad now, for Sequential" in second


@on_ranks(2)
def test_log_of_rare_events_is_at_debug(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.train(vectors(), steps=1)
    with logged(logging.DEBUG) as messages:
        output = trial.ddp(torch.randn(4, 8))
        output.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        trial.ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert any(m.startswith("DEBUG a backward failed") for m in messages)
    assert any(m.startswith("INFO buckets are reduced by the communication hook allreduce_hook") for m in messages)
    trial.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("nth", range(1, 5))
def test_log_of_a_prefetch_that_fails_and_the_next_forward_casts(rank: Rank, nth: int) -> None:
    trial = Trial(rank, mlp(), options={"prefetch": True, "bucket_mb": 0.0002, "first_bucket_mb": 0.0002})
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.125)
    trial.backward(square_step, rank.inputs(vectors()))
    _C.host_fail_at(nth)
    try:
        with logged() as messages:
            optimizer.step()
    finally:
        _C.host_fail_at(0)
    assert [m.split(":")[0] for m in messages] == ["WARNING casting ahead failed and is left to the next forward"]
    trial.oracle_step(torch.optim.SGD(trial.oracle.module.parameters(), lr=0.125))
    assert all(p.dtype is F32 for p in trial.module.parameters())
    trial.zero_grad()
    casts = ddp_mp.stats(trial.ddp).casts
    trial.backward(square_step, rank.inputs(vectors(), 1))
    trial.check()
    assert ddp_mp.stats(trial.ddp).casts == casts + 1, "the copies are not taken for good ones"
    with logged() as messages:
        trial.train(vectors(), steps=2, seed=2)
    assert messages == []


@on_ranks(2)
def test_log_of_a_prefetch_that_cannot_work_and_the_next_forward_raises(rank: Rank) -> None:
    trial = Trial(rank, Two(), options={"prefetch": True})
    kept = mean_square(trial.ddp, torch.randn(4, 8))
    kept.backward(retain_graph=True)  # its copies are kept: new ones are made for the next forward
    trial.zero_grad()
    trial.module.b.weight.data = torch.randn(9, 9)
    with logged() as messages:
        torch.optim.SGD(trial.module.parameters(), lr=0.125).step()
    assert len(messages) == 1
    assert "b.weight" in messages[0]
    with pytest.raises(ValueError, match=r"b\.weight.*expected shape"):
        trial.ddp(torch.randn(4, 8))
    assert all(p.dtype is F32 for p in trial.module.parameters())
    del kept


@on_ranks(2)
def test_log_says_nothing_in_a_step_that_goes_as_the_one_before(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    with logged(logging.DEBUG) as messages:
        trial.train(vectors(), steps=3, accumulate=2)
        with torch.no_grad():
            trial.ddp(torch.randn(4, 8))
    assert messages == []


@on_ranks(2)
def test_log_of_a_wrapper_that_takes_the_module_over(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    with logged() as messages:
        ddp_mp.patch(DistributedDataParallel(trial.module), mixed_precision=MIXED)
    assert any("through another wrapper" in m for m in messages)
    assert mean_square(trial.ddp, torch.randn(4, 8)).dtype is F32


def test_log_is_silent_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("ddp_mp").warning("nobody listens")
    assert capsys.readouterr() == ("", "")
