"""What the user does with gradients between two backwards: writes into them, holds on to them, lets ours go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.inside import _C
from kit.modules import mlp, scalar, vectors
from kit.oracle import BF16, FP16, Trial, mean_square, patched, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp


def gapped() -> nn.Linear:
    """Its weight is not packed."""
    model = nn.Linear(4, 1, bias=False)
    model.weight = nn.Parameter(torch.full((1, 8), 0.5)[:, ::2])
    return model


def step(ddp: Any, value: float) -> None:
    """A backward that adds ``value`` to the gradient of every weight of :func:`scalar` or :func:`gapped`."""
    ddp(torch.full((1, ddp.module.in_features), float(value))).sum().backward()


def same_on_all_ranks(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        total = param.grad.clone()
        dist.all_reduce(total)
        require_same(name, param.grad * dist.get_world_size(), total)


# --- written in place ----------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("make", [scalar, gapped])
@pytest.mark.parametrize("local", [False, True])
def test_written_differently_by_rank_is_averaged_with_the_next_gradient(rank: Rank, make: Any, local: bool) -> None:
    """As DistributedDataParallel does, which reduces whatever is in ``.grad``."""
    model = make()
    ddp = patched(model)
    step(ddp, 1)
    model.weight.grad.add_(8.0 * rank.index)
    if local:
        with ddp.no_sync():
            step(ddp, 16)
    step(ddp, 2)
    assert set(model.weight.grad.flatten().tolist()) == {1 + 4 + 2 + 16 * local}


ON_ONE_RANK: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "cleared": lambda rank, param: rank.index == 0 and setattr(param, "grad", None),
    "zeroed": lambda rank, param: rank.index == 0 and param.grad.zero_(),
    "scaled": lambda rank, param: rank.index == 0 and param.grad.mul_(0.5),
    "replaced": lambda rank, param: rank.index == 0 and setattr(param, "grad", param.grad * 0.5),
    "scaled unseen": lambda rank, param: rank.index == 0 and param.grad.data.mul_(0.5),  # by no version counter
}


@on_ranks(2)
@pytest.mark.parametrize("make", [scalar, gapped])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("change", ON_ONE_RANK)
def test_changed_on_one_rank_only_between_two_reductions_equals_ddp(rank: Rank, make: Any, local: bool, change: str) -> None:
    found = []
    for model, wrap in ((scalar(), DistributedDataParallel), (make(), patched)):
        ddp = wrap(model)
        step(ddp, 1 + rank.index)
        ON_ONE_RANK[change](rank, model.weight)
        if local:
            with ddp.no_sync():
                step(ddp, 16)
        step(ddp, 2 + rank.index)
        found.append(set(model.weight.grad.flatten().tolist()))
    assert found[0] == found[1]
    same_on_all_ranks(model)


@on_ranks(2)
def test_written_by_a_local_penalty_leaves_ranks_equal(rank: Rank) -> None:
    model = mlp()
    ddp = patched(model)
    for seed in range(0, 6, 2):
        ddp(rank.inputs(vectors(), seed)[rank.index]).float().square().mean().backward()
        penalty = model(rank.inputs(vectors(), seed + 1)[rank.index].to(BF16)).float().square().sum()
        for param, grad in zip(model.parameters(), torch.autograd.grad(penalty, list(model.parameters())), strict=True):
            param.grad += grad.float()
    ddp(rank.inputs(vectors(), 10)[rank.index]).float().square().mean().backward()
    same_on_all_ranks(model)


@on_ranks(2)
def test_written_equally_is_kept_and_added_to(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.tolerance = 2**-20  # the mean of sums, or the sum of means
    for seed in range(4):
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        for param in trial.module.parameters():
            param.grad.mul_(0.5)
        for grads in trial.oracle.grads:
            grads |= {name: grad * 0.5 for name, grad in grads.items()}


@on_ranks(2)
def test_written_in_one_row_leaves_the_others_of_its_bucket_right(rank: Rank) -> None:
    """Gradients of a bucket are views of one buffer, and share its version counter."""
    trial = Trial(rank, mlp())
    trial.tolerance = 2**-20
    for seed in range(3):
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.module[0].bias.grad.zero_()
        for grads in trial.oracle.grads:
            grads["0.bias"].zero_()


@on_ranks(2)
def test_not_written_is_added_to_bit_for_bit_through_local_steps(rank: Rank) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(BF16, BF16))
    for seed, sync in enumerate([True, False, True, True, False, False, True]):
        trial.backward(square_step, rank.inputs(vectors(), seed), sync=sync)
        trial.check()


# --- held by somebody else -----------------------------------------------------------------------------------------------


@on_ranks(1)
def test_gradient_that_is_another_parameters_gradient_too_keeps_its_value(rank: Rank) -> None:
    model = scalar()
    ddp = patched(model)
    other = nn.Parameter(torch.zeros_like(model.weight))
    step(ddp, 1)
    other.grad = model.weight.grad
    model.zero_grad()
    step(ddp, 5)
    assert (other.grad.item(), model.weight.grad.item()) == (1, 5)


@on_ranks(1)
def test_gradient_that_a_graph_saved_keeps_its_value(rank: Rank) -> None:
    model = scalar()
    ddp = patched(model)
    step(ddp, 1)
    factor = torch.ones(1, 1, requires_grad=True)
    product = (factor * model.weight.grad).sum()
    model.zero_grad()
    step(ddp, 7)
    product.backward()
    assert (factor.grad.item(), model.weight.grad.item()) == (1, 7)


@on_ranks(1)
def test_gradients_memory_is_used_again_when_nobody_holds_it(rank: Rank) -> None:
    model = scalar()
    ddp = patched(model)
    addresses = set()
    for value in range(4):
        step(ddp, value)
        addresses.add(model.weight.grad.data_ptr())
        model.zero_grad()
    assert len(addresses) == 1


@on_ranks(1)
def test_gradients_memory_that_the_user_holds_as_a_storage_keeps_its_values(rank: Rank) -> None:
    model = scalar()
    ddp = patched(model)
    addresses = set()
    for value in range(1, 7):
        step(ddp, value)
        addresses.add(model.weight.grad.data_ptr())
        if value == 2:
            kept, offset = model.weight.grad.untyped_storage(), model.weight.grad.storage_offset()
        model.zero_grad()
    assert torch.empty(0).set_(kept, offset, (1,)).item() == 2
    assert len(addresses) == 2  # and what took its place is used again


# --- averages ------------------------------------------------------------------------------------------------------------


@on_ranks(3)
@pytest.mark.parametrize("make", [scalar, gapped])
@pytest.mark.parametrize("onto", [False, True])
def test_average_in_float16_over_three_ranks_is_divided_in_full_precision(rank: Rank, make: Any, onto: bool) -> None:
    model = make()
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=ddp_mp.MixedPrecision(FP16, FP16))
    if onto:
        step(ddp, 0)  # what is added to: nothing, but it is there
    step(ddp, (667, 667, 668)[rank.index])
    assert set(model.weight.grad.flatten().tolist()) == {
        torch.tensor(1001 / 1.5).item()
    }  # the halves' sum, which float16 has exactly


# --- hooks of the user ---------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("cap", [25, 0.0001])
@pytest.mark.parametrize("when", ["before_patch", "after_patch", "between", "both"])
def test_hook_after_accumulation_sees_the_gradient_and_what_it_does_is_reduced(rank: Rank, cap: float, when: str) -> None:
    """Whenever it is registered: as PyTorch's reducer does, ours hears of a gradient after all such hooks."""
    model = mlp()
    seen: list[bool] = []
    handles: list[Any] = []

    def register() -> None:
        def scale(param: torch.Tensor) -> None:
            seen.append(param.grad is not None)
            if param.grad is not None:
                param.grad.mul_(2 + 2 * rank.index)

        handles.extend(param.register_post_accumulate_grad_hook(scale) for param in model.parameters())

    if when in ("before_patch", "both"):
        register()
    trial = Trial(rank, model, bucket_cap_mb=cap)
    ddp = trial.ddp
    if when in ("after_patch", "both"):
        register()
    xs = rank.inputs(vectors())
    loss = mean_square(ddp, xs[rank.index])
    if when == "between":
        register()
    loss.backward()
    times = 2 if when == "both" else 1
    assert seen == [True] * 4 * times
    found = [trial.oracle.gradients(square_step, x, 0) for x in xs]
    for name, param in model.named_parameters():
        due = sum((grads[name] * (2 + 2 * index) ** times for index, grads in enumerate(found)), torch.zeros(())) / 2
        require_same(name, param.grad, due)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    trial.train(vectors(), steps=2)


@on_ranks(1)
def test_hooks_after_accumulation_of_the_user_stay_when_ours_go(rank: Rank) -> None:
    model = scalar()
    ddp = patched(model)
    calls: list[int] = []
    handle = model.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    ddp_mp.unpatch(ddp)
    step(ddp, 1)
    assert calls == [1]
    handle.remove()
    step(ddp, 1)
    assert calls == [1]
    assert not model.weight._post_accumulate_grad_hooks


# --- kept through errors -------------------------------------------------------------------------------------------------


class Looked(nn.Module):
    """A sparse gradient, which is not packed, between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.table = nn.Embedding(4, 4, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(self.table(index)))


@on_ranks(1)
@pytest.mark.parametrize("sync", [True, False])
def test_gradient_that_is_not_packed_survives_an_error_of_the_device_anywhere(rank: Rank, sync: bool) -> None:
    model = Looked()
    ddp = patched(model, bucket_cap_mb=1e-5)
    index = torch.tensor([1, 2])
    failures = 0
    for nth in range(1, 60):
        model.zero_grad()
        ddp(index).sum().backward()
        before = model.table.weight.grad.to_dense()
        with contextlib.nullcontext() if sync else ddp.no_sync():
            loss = ddp(index).sum()
            _C.host_fail_at(nth)
            try:
                loss.backward()
            except ddp_mp.DeviceError:
                failures += 1
            else:
                break
            finally:
                _C.host_fail_at(0)
        assert (
            model.table.weight.dtype is torch.float32
        )  # gradients may be those of before or, of buckets already given, the new ones
        model.zero_grad()
        ddp(index).sum().backward()
        require_same("the next one", model.table.weight.grad.to_dense(), before)
    assert failures > (3 if sync else 1)


@on_ranks(2)
@pytest.mark.parametrize("wrong", ["numel", "dtype"])
def test_result_of_a_communication_hook_that_does_not_fit_changes_no_gradient(rank: Rank, wrong: str) -> None:
    model = mlp()
    ddp = patched(model, bucket_cap_mb=0.0001)
    results: list[Any] = []

    def hook(state, bucket):  # no annotations: register_comm_hook compares them
        future: torch.futures.Future[Any] = torch.futures.Future()
        fits = bucket.buffer() if bucket.index() < 1 or not results else results[0](bucket.buffer())
        future.set_result(fits)
        return future

    ddp.register_comm_hook(None, hook)
    square_step(ddp, torch.ones(4, 8))
    before = [param.grad.clone() for param in model.parameters()]
    results.append({"numel": lambda buffer: buffer[:-1], "dtype": lambda buffer: buffer.to(torch.int32)}[wrong])
    with pytest.raises(ValueError, match=r"communication hook: bucket 1: expected \d+ elements of a floating-point type"):
        square_step(ddp, torch.ones(4, 8))
    for (name, param), grad in zip(model.named_parameters(), before, strict=True):
        require_same(name, param.grad, grad)
    results.clear()
    model.zero_grad()
    square_step(ddp, torch.ones(4, 8))
    for (name, param), grad in zip(model.named_parameters(), before, strict=True):
        require_same(name, param.grad, grad)


@on_ranks(1)
def test_result_of_a_communication_hook_that_does_not_fit_a_gapped_parameter_is_named(rank: Rank) -> None:
    model = gapped()
    ddp = patched(model)

    def hook(state, bucket):  # no annotations: register_comm_hook compares them
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(torch.zeros(3))
        return future

    ddp.register_comm_hook(None, hook)
    with pytest.raises(ValueError, match="communication hook: bucket 0, parameter 'weight': expected 4 elements"):
        step(ddp, 1)
