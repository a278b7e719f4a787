"""Uses that break an implementation which trusts its users: each did break this one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from kit.modules import column, mlp, scalar, vectors
from kit.oracle import BF16, F32, FP16, Trial, mean_square, patched
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.func import functional_call, grad

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


def fail(*_: Any) -> None:
    raise MemoryError("no luck")


@on_ranks(2)
def test_failed_backward_puts_masters_and_gradients_back_before_the_error_is_seen(rank: Rank) -> None:
    module = scalar()
    ddp = patched(module)
    ddp(column(3)).sum().backward()
    handle = module.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        ddp(column(5)).sum().backward()
    handle.remove()
    assert module.weight.dtype is F32
    assert module.weight.grad.item() == 3
    ddp.zero_grad()
    ddp(column(4)).sum().backward()
    assert module.weight.grad.item() == 4


@on_ranks(2)
def test_write_after_a_discarded_forward_is_kept(rank: Rank) -> None:
    module = scalar()
    ddp = patched(module)
    ddp(column(1))
    gc.collect()
    nn.init.constant_(module.weight, 3.0)
    with torch.no_grad():
        assert ddp(column(1)).item() == 3.0


@on_ranks(2)
def test_numpy_view_of_a_weight_inside_forward_changes_nothing(rank: Rank) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(FP16, F32))
    handle = trial.module[0].register_forward_hook(lambda m, *_: m.weight.detach().numpy().mean() and None)
    trial.train(vectors())
    handle.remove()
    ddp_mp.unpatch(trial.ddp)


@on_ranks(2)
def test_memory_of_a_leaf_that_the_user_holds_as_a_storage_keeps_its_values(rank: Rank) -> None:
    model = scalar()
    ddp = patched(torch.nn.Sequential(model))
    seen: list[torch.Tensor] = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.weight))
    for step in range(6):
        seen.clear()
        loss = ddp(column(1)).sum()
        if step == 1:
            kept, offset = seen[0].untyped_storage(), seen[0].storage_offset()
            value = seen[0].item()
        loss.backward()
        with torch.no_grad():
            model.weight.add_(1)
    assert torch.empty(0, dtype=BF16).set_(kept, offset, (1,)).item() == value
    assert kept.nbytes() > 0
    assert ddp_mp.stats(ddp).low_bytes == 0  # what took its place is freed again


@on_ranks(2)
def test_weight_in_shared_memory_between_forward_and_backward(rank: Rank) -> None:
    module = mlp()
    ddp = patched(module)
    for _ in range(3):
        loss = mean_square(ddp, torch.randn(4, 8))
        module[0].weight.detach().share_memory_()
        loss.backward()
        assert all(p.dtype is F32 and p.grad.dtype is F32 for p in module.parameters())


@on_ranks(2)
def test_wrappers_that_share_a_submodule_are_both_patched(rank: Rank) -> None:
    shared = nn.Linear(8, 8)
    wrappers = [patched(nn.Sequential(shared, nn.Linear(8, 4))) for _ in range(2)]
    assert all(ddp_mp.is_patched(ddp) for ddp in wrappers)
    for ddp in wrappers * 2:
        assert ddp(torch.randn(2, 8)).dtype is BF16
        mean_square(ddp, torch.randn(2, 8)).backward()
        assert shared.weight.grad.dtype is F32
        ddp.zero_grad()


@on_ranks(2)
def test_first_forward_with_tensors_in_place_of_parameters(rank: Rank) -> None:
    module = mlp()
    ddp = patched(module)
    weights = {name: p.detach() for name, p in module.named_parameters()}
    gradients = grad(lambda w: functional_call(module, w, (torch.randn(2, 8),)).sum())(weights)
    assert all(g.dtype is F32 for g in gradients.values())
    mean_square(ddp, torch.randn(4, 8)).backward()
    assert all(p.grad.dtype is F32 for p in module.parameters())


@on_ranks(2)
def test_unpatch_inside_a_backward_is_refused(rank: Rank) -> None:
    module = mlp()
    ddp = patched(module)
    seen = []

    def unpatch(_: Any) -> None:
        with pytest.raises(RuntimeError, match="under way"):
            ddp_mp.unpatch(ddp)
        seen.append(1)

    handle = module[2].weight.register_post_accumulate_grad_hook(unpatch)
    mean_square(ddp, torch.randn(2, 8)).backward()
    handle.remove()
    assert seen
    assert ddp_mp.is_patched(ddp)
