"""Values that are loaded, and parameters that are replaced, are those that train from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.modules import Two, mlp, vectors
from kit.moments import MOMENTS, at
from kit.oracle import BF16, F32, Oracle, Trial, mean_square, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)


@on_ranks(2)
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m not in ("in_forward", "after_forward")])
def test_load_state_dict_at_any_time_reaches_the_masters(rank: Rank, moment: str, assign: bool, reuse: bool) -> None:
    trial = Trial(rank, mlp(), options={"reuse_unchanged": reuse, "prefetch": reuse})
    torch.manual_seed(5)
    state = {name: torch.randn_like(p) for name, p in trial.oracle.module.named_parameters()}

    def act() -> None:
        trial.module.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)

    at(moment, trial, act)
    trial.oracle.module.load_state_dict(state)
    trial.check()
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("whose", ["wrapper", "part"])
def test_load_state_dict_between_forward_and_backward_keeps_both(rank: Rank, whose: str) -> None:
    trial = Trial(rank, mlp())
    xs = rank.inputs(vectors())
    loss = mean_square(trial.ddp, xs[rank.index])
    trial.oracle.backward(square_step, xs)
    state = {name: torch.full_like(p, 0.123456789) for name, p in trial.oracle.module.named_parameters()}
    if whose == "wrapper":
        trial.ddp.load_state_dict({f"module.{name}": value for name, value in state.items()})
        trial.oracle.module.load_state_dict(state)
    else:
        part = {"weight": state["2.weight"], "bias": state["2.bias"]}
        trial.module[2].load_state_dict(part)
        trial.oracle.module[2].load_state_dict(part)
    loss.backward()  # with the values that the forward was computed with
    trial.check()
    trial.zero_grad()
    trial.train(vectors(), seed=5)


@on_ranks(2)
@pytest.mark.parametrize("low", [False, True])
def test_load_state_dict_by_swapping_tensors_is_used_and_trained(rank: Rank, low: bool) -> None:
    # low: nothing is cast, so that nobody looks at the parameters' memory
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(None, F32) if low else MIXED).train(vectors())
    torch.manual_seed(5)
    state = {name: torch.randn_like(p) for name, p in trial.oracle.module.named_parameters()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        trial.module.load_state_dict({name: value.clone() for name, value in state.items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    trial.oracle.module.load_state_dict(state)
    trial.train(vectors(), seed=10)


@on_ranks(2)
def test_parameter_tensor_swapped_is_reduced(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    torch.manual_seed(5)
    torch.utils.swap_tensors(trial.module[0].weight, nn.Parameter(torch.randn(8, 8)))
    trial.oracle.module[0].weight.data = trial.module[0].weight.detach().clone()
    trial.train(vectors(), seed=10)


@on_ranks(2)
def test_parameter_tensor_swapped_and_another_replaced_is_reduced(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    torch.manual_seed(5)
    trial.module[2].bias = nn.Parameter(trial.module[2].bias.detach().clone())
    torch.utils.swap_tensors(trial.module[0].weight, nn.Parameter(torch.randn(8, 8)))
    trial.oracle.module[0].weight.data = trial.module[0].weight.detach().clone()
    trial.train(vectors(), seed=10)


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_parameter_that_is_not_cast_swapped_or_replaced_is_reduced(rank: Rank, unused: bool) -> None:
    trial = Trial(rank, mlp(), ddp_mp.MixedPrecision(None, BF16), find_unused_parameters=unused).train(vectors())
    for number, swap in enumerate((True, False)):
        torch.manual_seed(number)
        new = nn.Parameter(torch.randn(8, 8))
        if swap:
            torch.utils.swap_tensors(trial.module[0].weight, new)
        else:
            trial.module[0]._parameters["weight"] = new  # as Module.to() does when it overwrites parameters: no hook says so
        trial.oracle.module[0].weight.data = trial.module[0].weight.detach().clone()
        trial.train(vectors(), seed=10 * number)


@on_ranks(2)
def test_parameter_data_replaced_is_the_master_from_then_on(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for seed in range(3):
        torch.manual_seed(seed)
        for ours, theirs in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
            ours.data = torch.randn_like(ours)
            theirs.data = ours.data.clone()
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_parameter_object_replaced_is_trained(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    torch.manual_seed(3)
    trial.module[0].weight = nn.Parameter(torch.randn(8, 8))
    trial.oracle.module[0].weight.data = trial.module[0].weight.detach().clone()
    trial.train(vectors(), seed=20)
    assert ddp_mp.stats(trial.ddp).rebuilds == 1


@on_ranks(2)
def test_parameter_module_replaced_is_trained(rank: Rank) -> None:
    trial = Trial(rank, Two()).train(vectors())
    torch.manual_seed(3)
    trial.module.b = nn.Linear(8, 8)
    trial.oracle.module.b.load_state_dict(trial.module.b.state_dict())
    trial.train(vectors(), seed=20)


@on_ranks(2)
def test_parameter_of_another_shape_is_refused_by_name(rank: Rank) -> None:
    for place in ("data", "object"):
        trial = Trial(rank, mlp())
        if place == "data":
            trial.module[2].weight.data = torch.randn(8, 9)
        else:
            trial.module[2].weight = nn.Parameter(torch.randn(8, 9))
        with pytest.raises(ValueError, match=r"2\.weight.*\(8, 8\).*\(8, 9\).*wrap the module again"):
            trial.ddp(torch.randn(4, 8))
        assert trial.module[0].weight.dtype is F32


@on_ranks(2)
def test_parameter_added_is_refused_by_name_unless_frozen(rank: Rank) -> None:
    trial = Trial(rank, Two())
    trial.module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"'extra'.*wrap the module again"):
        trial.ddp(torch.randn(4, 8))
    trial.module.extra.requires_grad_(False)
    assert trial.ddp(torch.randn(4, 8)).dtype is BF16
    del trial.module.extra
    trial.train(vectors())


@on_ranks(1)
def test_parameter_added_can_be_evaluated_and_is_an_error_once_it_would_be_trained(rank: Rank) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED)
    mean_square(ddp, torch.randn(4, 8)).backward()
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    for _ in range(2):
        with torch.no_grad():
            assert ddp(torch.randn(4, 8)).dtype is BF16
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'0\.weight' was added after"):
                ddp(torch.randn(4, 8))
    model[0].weight.requires_grad_(False)
    mean_square(ddp, torch.randn(4, 8)).backward()
    assert {name: param.grad is not None for name, param in model.named_parameters()} == {
        "0.bias": True,
        "0.weight": False,
        "1.weight": True,
        "1.bias": True,
    }


def follow(trial: Trial, act: Callable[[nn.Module], Any]) -> None:
    """Does the same to the model and to its oracle, which is made anew: it goes by the names of the parameters."""
    with torch.no_grad():  # what a parameter is computed from is no graph then, which could not be copied
        act(trial.module)
        act(trial.oracle.module)
    trial.oracle = Oracle(trial.oracle.module, trial.rank.size, trial.precision)


@on_ranks(2)
@pytest.mark.parametrize("wrapping", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_parameter_that_is_pruned_has_another_name_and_is_trained(rank: Rank, wrapping: dict[str, Any]) -> None:
    trial = Trial(rank, mlp(), **wrapping).train(vectors())
    weight, computed_in = trial.module[0].weight, set()
    handle = trial.module[0].register_forward_hook(lambda m, *_: computed_in.add((m.weight_orig.dtype, m.weight.dtype)))
    for times in (1, 2):
        follow(trial, lambda module: prune.l1_unstructured(module[0], "weight", 16))
        assert trial.module[0].weight_orig is weight
        assert int((trial.module[0].weight_mask == 0).sum()) == 16 * times
        trial.train(vectors(), seed=100 * times)
    assert computed_in == {(BF16, BF16)}
    handle.remove()
    follow(trial, lambda module: prune.remove(module[0], "weight"))
    assert trial.module[0].weight is weight
    assert int((weight == 0).sum()) == 32
    trial.train(vectors(), seed=300)
    assert ddp_mp.stats(trial.ddp).parameters == 4


class Doubled(nn.Module):
    """What a weight is computed by."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@on_ranks(2)
def test_parameter_that_is_parametrised_has_another_name_and_is_trained(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    follow(trial, lambda module: parametrize.register_parametrization(module[0], "weight", Doubled()))
    trial.train(vectors(), seed=100)
    follow(trial, lambda module: parametrize.remove_parametrizations(module[0], "weight"))
    trial.train(vectors(), seed=200)


@on_ranks(2)
def test_module_converted_to_another_type_follows_or_is_named(rank: Rank) -> None:
    trial = Trial(rank, mlp()).train(vectors())
    trial.module.double()
    trial.oracle.module.double()
    trial.train(vectors(), seed=10)
    assert trial.module[0].weight.dtype is torch.float64


@on_ranks(2)
def test_parameters_named_by_one_optimizer_stay_the_same_objects(rank: Rank) -> None:
    model = mlp()
    before = [id(p) for p in model.parameters()]
    trial = Trial(rank, model).train(vectors())
    ddp_mp.unpatch(trial.ddp)
    assert [id(p) for p in model.parameters()] == before
