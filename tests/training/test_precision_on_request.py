"""Masters on request, writes at any time, and options that reuse copies."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from kit.modules import column, mlp, scalar, vectors
from kit.moments import MOMENTS, at
from kit.oracle import BF16, F32, Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


@on_ranks(2)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "in_forward"])
def test_full_precision_at_any_time_shows_masters(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())

    def act() -> None:
        with ddp_mp.full_precision(trial.ddp):
            for got, want in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
                require_same("master", got, want)

    at(moment, trial, act)
    trial.train(vectors())


@on_ranks(2)
def test_full_precision_between_forward_and_backward_does_not_disturb_it(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for seed in range(2):
        xs = rank.inputs(vectors(), seed)
        loss = mean_square(trial.ddp, xs[rank.index])
        with ddp_mp.full_precision(trial.ddp):
            trial.module.state_dict()
        loss.backward()
        trial.oracle.backward(square_step, xs)
        trial.check()
        trial.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("bare", [False, True])
def test_full_precision_around_a_forward_computes_with_masters(rank: Rank, bare: bool) -> None:
    trial = Trial(rank, scalar(1 + 2**-10))
    call = trial.module if bare else trial.ddp
    with ddp_mp.full_precision(trial.ddp):
        output = call(column(1 + 2**-11))
    assert output.dtype is F32
    assert output.item() == pytest.approx((1 + 2**-10) * (1 + 2**-11), rel=1e-6)
    output.sum().backward()
    assert trial.module.weight.grad.item() == 1 + 2**-11
    assert call(column(1)).dtype is BF16


@on_ranks(2)
def test_write_between_forward_and_backward_stays(rank: Rank) -> None:
    trial = Trial(rank, scalar(0.5))
    output = trial.ddp(column(1))
    with torch.no_grad():
        trial.module.weight.fill_(0.75)
    output.sum().backward()
    assert trial.module.weight.item() == 0.75
    assert trial.ddp(column(1)).item() == 0.75


@on_ranks(2)
def test_full_precision_of_an_unpatched_model_does_nothing(rank: Rank) -> None:
    ddp = DistributedDataParallel(scalar())
    with ddp_mp.full_precision(ddp):
        assert ddp.module.weight.dtype is F32


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"prefetch": True}, {"reuse_unchanged": True}], ids=str)
def test_masters_changed_after_an_invisible_write_casts_again(rank: Rank, options: dict[str, Any]) -> None:
    trial = Trial(rank, scalar(0.5), options=options)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.0)
    trial.ddp(column(1)).sum().backward()
    optimizer.step()
    trial.module.weight.data.fill_(0.75)
    ddp_mp.masters_changed(trial.ddp)
    assert trial.ddp(column(1)).item() == 0.75
    kept = trial.ddp(column(1))  # copies are in place now
    with ddp_mp.full_precision(trial.ddp):
        trial.module.weight.data.fill_(1.5)
    ddp_mp.masters_changed(trial.ddp)
    assert trial.ddp(column(1)).item() == 1.5
    del kept


@on_ranks(2)
def test_masters_changed_of_an_unpatched_model_is_an_error(rank: Rank) -> None:
    with pytest.raises(ValueError, match="not patched"):
        ddp_mp.masters_changed(DistributedDataParallel(scalar()))


@on_ranks(2)
@pytest.mark.parametrize("names", [("prefetch",), ("reuse_unchanged",), ("prefetch", "reuse_unchanged")])
def test_options_that_reuse_copies_train_as_without(rank: Rank, names: tuple[str, ...]) -> None:
    trial = Trial(rank, mlp(), options=dict.fromkeys(names, True))
    for repeat, make in enumerate(
        (
            lambda ps: torch.optim.SGD(ps, lr=0.1),
            lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
            lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
        )
    ):
        trial.train(vectors(), steps=3, accumulate=2, optimizer=make, seed=100 * repeat)
        with torch.no_grad():
            trial.ddp(torch.randn(4, 8))
            trial.module[0].weight.mul_(1.25)
            trial.oracle.module[0].weight.mul_(1.25)
    counters = ddp_mp.stats(trial.ddp)
    assert counters.casts + counters.skipped >= counters.forwards
    if "reuse_unchanged" in names:
        assert counters.skipped > 0


@on_ranks(2)
@pytest.mark.parametrize(("name", "write"), [("prefetch", "step"), ("reuse_unchanged", "step"), ("reuse_unchanged", "visible")])
def test_options_copies_of_before_a_write_are_gone_after_a_late_backward(rank: Rank, name: str, write: str) -> None:
    module = scalar(0.5)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=MIXED, options=ddp_mp.Options(**{name: True}))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.25, fused=True)
    ddp(column(1)).sum().backward()
    early = ddp(column(1)).sum()
    if write == "step":
        optimizer.step()
        if name == "reuse_unchanged":
            ddp(column(1))
    else:
        with ddp_mp.full_precision(ddp), torch.no_grad():
            module.weight.fill_(0.25)
    early.backward()
    with torch.no_grad():
        assert ddp(column(1)).item() == 0.25


@on_ranks(1)
@pytest.mark.parametrize("name", ["prefetch", "reuse_unchanged", None])
@pytest.mark.parametrize("kept", [True, False])
def test_options_a_write_between_two_forwards_is_in_the_second(rank: Rank, name: str | None, kept: bool) -> None:
    model = scalar(1.0)
    options = ddp_mp.Options(**({name: True} if name else {}))
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ddp(column(1)).sum().backward()
    optimizer.step()
    output = ddp(column(1))
    if not kept:
        del output
        gc.collect()
    with torch.no_grad():
        model.weight.clamp_(max=0.5)
    assert ddp.state_dict()["module.weight"].item() == 0.5
    for _ in range(3):
        output = ddp(column(1))
        assert output.item() == 0.5
        output.sum().backward()


@on_ranks(2)
def test_options_prefetch_with_an_optimizer_of_some_parameters_trains_as_without(rank: Rank) -> None:
    trial = Trial(rank, mlp(), options={"prefetch": True})
    ours = [torch.optim.SGD(trial.module[k].parameters(), lr=0.1) for k in (0, 2)]
    theirs = [torch.optim.SGD(trial.oracle.module[k].parameters(), lr=0.1) for k in (0, 2)]
    for seed in range(4):
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        for optimizer in ours:
            optimizer.step()
        for optimizer in theirs:
            trial.oracle_step(optimizer)
        trial.zero_grad()


def two_forwards(call: Any, x: Any) -> None:
    """One backward through two forwards."""
    (mean_square(call, x) + mean_square(call, x.flip(0) / 2)).backward()


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [True, False])
def test_options_prefetch_two_forwards_after_a_step_share_one_cast(rank: Rank, prefetch: bool) -> None:
    # their gradients are added in low precision, as the oracle does; added from two casts, the sum is another number
    trial = Trial(rank, mlp(), options={"prefetch": prefetch})
    torch.optim.SGD(trial.module.parameters(), lr=0.1).step()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # some other optimizer's step comes after it
    trial.backward(two_forwards, rank.inputs(vectors()))
    trial.check()


@on_ranks(2)
def test_options_prefetch_two_forwards_share_one_cast_although_other_leaves_are_free(rank: Rank) -> None:
    trial = Trial(rank, mlp(), options={"prefetch": True})
    waiting = mean_square(trial.ddp, vectors()())
    torch.optim.SGD(trial.module.parameters(), lr=0.1).step()  # nothing has a gradient yet; it casts into other leaves
    waiting.backward()
    del waiting
    trial.zero_grad()
    trial.backward(two_forwards, rank.inputs(vectors()))
    trial.check()
