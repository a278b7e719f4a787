"""State that users save, load, copy and ask for: it is full precision at any time, and nothing of ours stays behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kit.modules import Luck, Two, column, mlp, no_luck, scalar, vectors
from kit.oracle import BF16, F32, FP16, Oracle, Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.modules import module as of_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils import parametrize, prune
from torch.optim import optimizer as of_optimizer

import ddp_mp

MIXED = ddp_mp.MixedPrecision(BF16, F32)

#: Times at which parameters may be copies: name -> brings a trial there, and ends what it began.
MOMENTS = ("new", "after_forward", "after_backward", "after_evaluation", "after_error", "in_forward", "after_step")


def at(moment: str, trial: Trial, act: Callable[[], None]) -> None:
    """Calls ``act`` at a moment of training."""
    x = torch.randn(4, 8)
    if moment == "after_forward":
        loss = mean_square(trial.ddp, x)
        act()
        loss.backward()
    elif moment == "after_evaluation":
        trial.ddp(x)
        act()
    elif moment == "after_error":
        with pytest.raises(RuntimeError):
            trial.ddp(torch.randn(4, 9))
        act()
    elif moment == "in_forward":
        handle = trial.module.register_forward_hook(lambda *_: act())
        square_step(trial.ddp, x)
        handle.remove()
    else:
        if moment != "new":
            square_step(trial.ddp, x)
        if moment == "after_step":
            torch.optim.SGD(trial.module.parameters(), lr=0.0).step()
        act()
    trial.zero_grad()


# --- saving --------------------------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_state_dict_at_any_time_is_full_precision(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    want = {name: p.detach().clone() for name, p in trial.oracle.module.named_parameters()}
    seen: list[int] = []

    def act() -> None:
        for prefix, state in (("module.", trial.ddp.state_dict()), ("", trial.module.state_dict())):
            for name, value in want.items():
                require_same(name, state[prefix + name], value)
        require_same("part", trial.module[2].state_dict()["weight"], want["2.weight"])
        seen.append(1)

    at(moment, trial, act)
    assert seen
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "in_forward"])
def test_deepcopy_at_any_time_is_an_ordinary_module(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    copies: list[nn.Module] = []
    at(moment, trial, lambda: copies.extend([copy.deepcopy(trial.module), copy.deepcopy(trial.module[2])]))
    whole, part = copies
    for copied, original in ((whole, trial.oracle.module), (part, trial.oracle.module[2])):
        for (name, got), want in zip(copied.named_parameters(), original.parameters(), strict=True):
            require_same(name, got, want)
    require_ordinary(whole)
    require_ordinary(part)
    assert whole(torch.randn(2, 8)).dtype is F32
    with torch.no_grad():
        whole[0].weight.zero_()
    trial.check()
    Trial(rank, part).train(vectors())
    trial.train(vectors())


@on_ranks(2)
def test_deepcopy_as_an_average_model_follows_training(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    average = torch.optim.swa_utils.AveragedModel(trial.module)
    expected = copy.deepcopy(trial.oracle.module)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    for seed in range(3):
        trial.backward(square_step, rank.inputs(vectors(), seed))
        optimizer.step()
        trial.oracle_step(torch.optim.SGD(trial.oracle.module.parameters(), lr=0.1))
        trial.zero_grad()
        with torch.no_grad():
            trial.ddp(torch.randn(4, 8))
        average.update_parameters(trial.module)
        for mean, new in zip(expected.parameters(), trial.oracle.module.parameters(), strict=True):
            mean.data = new.data.clone() if seed == 0 else mean.data + (new.data - mean.data) / (seed + 1)
    for got, want in zip(average.module.parameters(), expected.parameters(), strict=True):
        require_same("average", got, want, 1e-6)


@on_ranks(2)
@pytest.mark.parametrize("moment", ["new", "after_forward", "after_backward"])
def test_pickle_and_save_of_module_and_wrapper_are_full_precision(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    loaded: list[nn.Module] = []

    def act() -> None:
        file = io.BytesIO()
        torch.save(trial.module, file)
        file.seek(0)
        loaded.append(torch.load(file, weights_only=False))
        loaded.append(pickle.loads(pickle.dumps(trial.module)))

    at(moment, trial, act)
    for module in loaded:
        require_ordinary(module)
        for (name, got), want in zip(module.named_parameters(), trial.oracle.module.parameters(), strict=True):
            require_same(name, got, want)
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("moment", ["new", "after_forward", "after_backward"])
def test_deepcopy_of_the_wrapper_is_an_unpatched_full_precision_wrapper(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp())
    copies: list[DistributedDataParallel] = []
    # process groups are not copied: DistributedDataParallel pickles without its own, and unpickles with the default
    at(moment, trial, lambda: copies.append(pickle.loads(pickle.dumps(trial.ddp))))
    (twin,) = copies
    assert not ddp_mp.is_patched(twin)
    for (name, got), want in zip(twin.module.named_parameters(), trial.oracle.module.parameters(), strict=True):
        require_same(name, got, want)
    twin(torch.randn(4, 8)).sum().backward()
    assert all(p.grad.dtype is F32 for p in twin.module.parameters())
    twin.zero_grad()
    twin_trial = Trial(rank, mlp())
    twin_trial.ddp, twin_trial.module = ddp_mp.patch(twin, mixed_precision=MIXED), twin.module
    for mine, theirs in zip(twin_trial.oracle.module.parameters(), twin.module.parameters(), strict=True):
        mine.data.copy_(theirs.data)
    twin_trial.train(vectors())
    trial.train(vectors())


def require_ordinary(module: nn.Module) -> None:
    """Nothing of ours is on the module, its parameters or its hooks."""
    for inner in module.modules():
        assert "__getstate__" not in inner.__dict__, f"{inner}: __getstate__"
        for name in inner.__dict__:
            assert "ddp_mp" not in name, f"{inner}: {name}"
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                assert not inner.__dict__[name], f"{inner}: {name}"
    for name, param in module.named_parameters():
        assert set(param.__dict__) <= {"_is_leaf"}, f"{name}: {param.__dict__}"
        assert param.dtype is not BF16, name
        assert not param._post_accumulate_grad_hooks, name
        assert not param._backward_hooks, name


@on_ranks(1)
def test_output_saved_with_its_graph_is_saved_without_a_warning(rank: Rank) -> None:
    ddp = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)
    output = ddp(torch.randn(4, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save({"output": output}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["output"], output)


# --- loading -------------------------------------------------------------------------------------------------------------


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


# --- full precision on request -------------------------------------------------------------------------------------------


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


# --- patching and unpatching ---------------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "in_forward"])
def test_unpatch_at_any_time_leaves_an_ordinary_model_that_trains(rank: Rank, moment: str) -> None:
    trial = Trial(rank, mlp(), how="later")

    def act() -> None:
        assert ddp_mp.unpatch(trial.ddp) is trial.ddp
        assert not ddp_mp.is_patched(trial.ddp)
        for got, want in zip(trial.module.parameters(), trial.oracle.module.parameters(), strict=True):
            require_same("master", got, want)

    if moment == "after_forward":
        mean_square(trial.ddp, torch.randn(4, 8))
        act()
    else:
        at(moment, trial, act)
    trial.zero_grad()
    assert {"_ddp_mp", "register_comm_hook", "_register_fused_optim", "__getstate__"}.isdisjoint(trial.ddp.__dict__)
    assert trial.ddp.mixed_precision is None
    for seed in range(3):
        xs = rank.inputs(vectors(), seed)
        output = trial.ddp(xs[rank.index])
        assert output.dtype is F32
        output.square().mean().backward()
        reference = copy.deepcopy(trial.oracle.module)
        sum(reference(x).square().mean() for x in xs).div(rank.size).backward()
        for got, want in zip(trial.module.parameters(), reference.parameters(), strict=True):
            require_same("gradient", got.grad, want.grad, 1e-5)
        trial.zero_grad()
    ddp_mp.patch(trial.ddp, mixed_precision=MIXED)
    trial.train(vectors())
    ddp_mp.unpatch(trial.ddp)
    require_ordinary(trial.module)


@on_ranks(2)
@pytest.mark.parametrize("what", ["unpatch", "patch that fails"])
def test_unpatch_in_inference_mode_leaves_an_ordinary_model_that_trains(rank: Rank, what: str) -> None:
    ddp = DistributedDataParallel(scalar())
    with torch.inference_mode():
        if what == "unpatch":
            ddp_mp.patch(ddp, mixed_precision=MIXED)
            assert ddp(column(3)).dtype is BF16
            ddp_mp.unpatch(ddp)
        else:
            with pytest.raises(ValueError, match="matches no module"):
                ddp_mp.patch(ddp, mixed_precision=MIXED, options=ddp_mp.Options(full_precision_modules=("none",)))
    assert not ddp_mp.is_patched(ddp)
    for _ in range(3):
        ddp(column(rank.index + 1)).sum().backward()
        assert ddp.module.weight.grad.item() == 1.5
        ddp.zero_grad()
    ddp_mp.patch(ddp, mixed_precision=MIXED)
    ddp(column(rank.index + 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5


@on_ranks(2)
def test_unpatch_after_forward_makes_its_backward_an_error(rank: Rank) -> None:
    trial = Trial(rank, scalar(), how="later")
    weight = trial.module.weight
    loss = trial.ddp(column(rank.index + 1)).sum()
    ddp_mp.unpatch(trial.ddp)
    with pytest.raises(RuntimeError, match="run the forward again"):
        loss.backward()
    assert weight.dtype is F32
    assert weight.grad is None


@on_ranks(2)
def test_wrapper_that_is_a_temporary_lives_until_its_backward(rank: Rank) -> None:
    module = scalar()
    for _ in range(3):
        module.weight.grad = None
        ddp_mp.patch(DistributedDataParallel(module), mixed_precision=MIXED)(column(rank.index + 1)).sum().backward()
        assert module.weight.grad.item() == 1.5
        gc.collect()
        require_ordinary(module)


@on_ranks(2)
def test_unpatch_of_a_model_built_with_mixed_precision_gives_pytorchs_own_back(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    ddp_mp.unpatch(trial.ddp)
    assert trial.ddp.mixed_precision is trial.precision
    names = {getattr(hook, "__name__", "") for hook in trial.module._forward_pre_hooks.values()}
    assert {"_root_copy_hook", "_module_wait_for_copy_hook"} <= names
    assert all(p._mp_param.dtype is BF16 for p in trial.module.parameters())
    ddp_mp.patch(trial.ddp)
    names = {getattr(hook, "__name__", "") for hook in trial.module._forward_pre_hooks.values()}
    assert names.isdisjoint({"_root_copy_hook", "_module_wait_for_copy_hook"})
    assert not any(hasattr(p, "_mp_param") for p in trial.module.parameters())
    trial.train(vectors())


@on_ranks(2)
def test_unpatch_of_an_unpatched_model_does_nothing(rank: Rank) -> None:
    ddp = DistributedDataParallel(scalar())
    before = dict(ddp.__dict__)
    assert ddp_mp.unpatch(ddp) is ddp
    assert ddp.__dict__ == before


@on_ranks(2)
def test_patch_is_idempotent_and_says_what_differs(rank: Rank) -> None:
    ddp = DistributedDataParallel(mlp(), mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)
    options = ddp_mp.Options(bucket_mb=3)
    assert ddp_mp.patch(ddp, options=options) is ddp
    inside = ddp.__dict__["_ddp_mp"]
    for arguments in ({}, {"mixed_precision": MIXED}, {"options": ddp_mp.Options(bucket_mb=3)}):
        assert ddp_mp.patch(ddp, **arguments) is ddp
    assert ddp.__dict__["_ddp_mp"] is inside
    with pytest.raises(ValueError, match="bfloat16"):
        ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(FP16, F32))
    with pytest.raises(ValueError, match="bucket_mb=3"):
        ddp_mp.patch(ddp, options=ddp_mp.Options())
    assert ddp_mp.is_patched(ddp)


@on_ranks(2)
def test_patch_refuses_what_it_cannot_train_right(rank: Rank) -> None:
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ddp_mp.patch(scalar())  # type: ignore[type-var]
    with pytest.raises(TypeError, match="Options"):
        ddp_mp.patch(DistributedDataParallel(scalar(), mixed_precision=MIXED), options="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mixed_precision=.*ddp_mp\.patch\(ddp, mixed_precision="):
        ddp_mp.patch(DistributedDataParallel(scalar()))
    with pytest.raises(TypeError, match="mixed_precision"):
        ddp_mp.patch(DistributedDataParallel(scalar()), mixed_precision=BF16)  # type: ignore[arg-type]


@on_ranks(1)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("full", [False, True])
def test_weight_that_is_renormalised_in_the_forward_reaches_the_master(rank: Rank, kind: Any, full: bool) -> None:
    model = nn.Sequential(kind(4, 8, max_norm=1.0), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    options = ddp_mp.Options(full_precision_modules=("0",) if full else ())
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED, options=options)
    untouched = model[0].weight[2:].detach().clone()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp(torch.tensor([[0, 1]])).float().sum().backward()
    messages = [str(warning.message) for warning in told if "written inside the forward" in str(warning.message)]
    assert len(messages) == (0 if full else 1)
    assert all("'0.weight'" in message for message in messages)
    assert model[0].weight[0].norm().item() == pytest.approx(1.0, rel=1e-3 if full else 1e-2)
    require_same("rows that the forward did not use", model[0].weight[2:], untouched)


@on_ranks(2)
def test_patch_refuses_an_optimizer_inside_backward(rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward

    module = scalar()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(module)
    with pytest.raises(RuntimeError, match=r"optimizer.*inside backward"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)
    patched = ddp_mp.patch(DistributedDataParallel(scalar()), mixed_precision=MIXED)
    with pytest.raises(RuntimeError, match="inside backward"):
        patched._register_fused_optim(torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_patch_refuses_delayed_all_reduce(rank: Rank) -> None:
    module = Two()
    delayed = [("a.weight", module.a.weight)]
    ddp = DistributedDataParallel(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.b.weight)
    with pytest.raises(RuntimeError, match="delay_all_reduce_named_params"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)


@on_ranks(2)
def test_patch_refuses_the_python_reducer(rank: Rank) -> None:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        ddp = DistributedDataParallel(scalar())
        if not ddp._use_python_reducer:
            pytest.skip("this PyTorch decides later")
        with pytest.raises(RuntimeError, match="python_reducer"):
            ddp_mp.patch(ddp, mixed_precision=MIXED)
    finally:
        torch._dynamo.config.optimize_ddp = before


@on_ranks(2)
def test_patch_that_fails_leaves_a_plain_wrapper_that_trains(rank: Rank) -> None:
    ddp = DistributedDataParallel(scalar())
    with pytest.raises(Luck):
        ddp_mp.patch(ddp, mixed_precision=MIXED, options=Odd())
    assert not ddp_mp.is_patched(ddp)
    require_ordinary(ddp.module)
    ddp(column(rank.index + 1)).sum().backward()
    assert ddp.module.weight.grad.item() == 1.5


@on_ranks(2)
@pytest.mark.parametrize("where", ["between", "wrapper_pre_hook"])
def test_patch_between_iterations_or_in_a_hook_takes_effect(rank: Rank, where: str) -> None:
    model = scalar()
    ddp = DistributedDataParallel(model)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
    ddp(column(2)).sum().backward()
    assert model.weight.grad.item() == 2
    ddp.zero_grad()

    def patch(*_: Any) -> None:
        ddp_mp.patch(ddp, mixed_precision=MIXED)

    if where == "between":
        patch()
    else:
        ddp.register_forward_pre_hook(patch)
    for _ in range(2):
        ddp(column(rank.index + 1)).sum().backward()
        assert model.weight.grad.item() == 1.5
        ddp.zero_grad()
    assert seen == [F32, BF16, BF16]


@on_ranks(2)
def test_patch_keeps_gradients_and_optimizer_state(rank: Rank) -> None:
    model = scalar()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    ddp(column(2)).sum().backward()
    optimizer.step()
    ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert model.weight.grad.item() == 2
    ddp(column(4)).sum().backward()
    assert model.weight.grad.item() == 6
    optimizer.step()
    assert model.weight.item() == 0.5 - 0.25 - 0.125 * 7


@on_ranks(2)
@pytest.mark.parametrize("first_patched", [True, False])
def test_wrapping_the_same_module_twice_gives_it_to_the_second(rank: Rank, first_patched: bool) -> None:
    model = mlp()
    first = Trial(rank, model, how="patch" if first_patched else "later")
    square_step(first.ddp, torch.randn(4, 8))
    first.ddp.zero_grad()
    second = Trial(rank, model, how="later")
    assert not ddp_mp.is_patched(first.ddp)
    second.train(vectors(), accumulate=2)
    assert ddp_mp.stats(second.ddp).casts == 6
    ddp_mp.unpatch(second.ddp)
    require_ordinary(model)


class Odd(ddp_mp.Options):
    """Options with which a plan cannot be made."""

    @property
    def bucket_bytes(self) -> int:
        raise Luck


@contextlib.contextmanager
def failing(where: str) -> Iterator[dict[str, Any]]:
    """Something that a patch does raises Luck; yields arguments of patch."""
    patched = {"guards": (ddp_mp.model.optimizer_steps, "add"), "buffers": (ddp_mp.patching, "cast_buffers")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        if where in patched:
            monkeypatch.setattr(*patched[where], no_luck)
        yield {"mixed_precision": MIXED, "options": Odd() if where == "plan" else ddp_mp.Options()}


@on_ranks(2)
@pytest.mark.parametrize("where", ["options", "plan", "guards", "buffers", "root"])
def test_wrapping_the_same_module_twice_and_failing_loses_nothing(rank: Rank, where: str) -> None:
    first = Trial(rank, mlp())
    calls: list[int] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch checks annotations
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    first.ddp.register_comm_hook(None, hook)
    first.train(vectors(), accumulate=2)
    counts, inside = ddp_mp.stats(first.ddp), first.ddp.__dict__["_ddp_mp"]
    xs = rank.inputs(vectors(), 50)
    second = DistributedDataParallel(first.module)  # before the forward: it broadcasts, into what the parameters are
    loss = mean_square(first.ddp, xs[rank.index])
    if where == "options":
        with pytest.raises(ValueError, match="nothing"):
            ddp_mp.patch(second, mixed_precision=MIXED, options=ddp_mp.Options(full_precision_modules=("nothing",)))
    elif where == "root":
        with pytest.raises(ValueError, match="need both"):
            ddp_mp.patch(second, mixed_precision=ddp_mp.MixedPrecision(BF16), options=ddp_mp.Options(hooks="root"))
    else:
        with failing(where) as arguments, pytest.raises(Luck) as error:
            ddp_mp.patch(second, **arguments)
        assert error.traceback, "what was built is still referred to"
    assert not ddp_mp.is_patched(second)
    assert first.ddp.__dict__["_ddp_mp"] is inside
    del second
    loss.backward()
    first.oracle.backward(square_step, xs)
    first.check()
    assert ddp_mp.stats(first.ddp).casts == counts.casts + 1
    first.zero_grad()
    first.train(vectors(), seed=60, accumulate=2)
    assert len(calls) == ddp_mp.stats(first.ddp).reductions
    kept = first.ddp(torch.randn(4, 8))
    assert all(p.dtype is F32 for p in copy.deepcopy(first.module).parameters())
    del kept
    ddp_mp.unpatch(first.ddp)
    require_ordinary(first.module)


@on_ranks(2)
def test_patch_that_fails_to_cast_a_buffer_leaves_all_as_they_were(rank: Rank) -> None:
    class Refusing(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise Luck

    model = scalar()
    model.register_buffer("first", torch.ones(2))
    ddp = DistributedDataParallel(model)
    model.register_buffer("second", torch.ones(2).as_subclass(Refusing))
    with pytest.raises(Luck):
        ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32, BF16))
    assert model.first.dtype is F32
    require_ordinary(model)


@on_ranks(2)
def test_wrapping_the_same_module_twice_inside_a_forward_is_refused(rank: Rank) -> None:
    module = mlp()
    first = Trial(rank, module)
    second = DistributedDataParallel(module)

    def patch(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="a forward or backward of this model is under way"):
            ddp_mp.patch(second, mixed_precision=MIXED)

    handle = module[0].register_forward_hook(patch)
    square_step(first.ddp, torch.randn(4, 8))
    handle.remove()
    assert not ddp_mp.is_patched(second)
    ddp_mp.unpatch(first.ddp)
    assert first.ddp.mixed_precision is first.precision, "what the wrapper was built with is not forgotten"


@on_ranks(2)
@pytest.mark.parametrize("dropped", [False, True])
def test_wrapping_the_same_module_twice_outlives_graphs_of_the_first(rank: Rank, dropped: bool) -> None:
    model = mlp()
    first = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED)
    graph = first(torch.randn(4, 8))  # keeps the first patch
    if dropped:
        del first
    second = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED)
    del graph
    gc.collect()
    kept = second(torch.randn(4, 8))
    assert all(p.dtype is F32 for p in copy.deepcopy(model).parameters())
    del kept


@on_ranks(2)
def test_wrapping_again_after_the_first_wrapper_is_gone_works(rank: Rank) -> None:
    model = mlp()
    for repeat in range(3):
        trial = Trial(rank, model, how="later")
        trial.train(vectors(), seed=10 * repeat)
        reference = weakref.ref(trial.ddp)
        del trial
        gc.collect()
        assert reference() is None
        require_ordinary(model)


@on_ranks(2)
@pytest.mark.parametrize("moment", MOMENTS[:5])
@pytest.mark.parametrize("collect", [True, False])
def test_dropping_the_wrapper_frees_everything_and_leaves_an_ordinary_module(rank: Rank, moment: str, collect: bool) -> None:
    trial = Trial(rank, mlp(), how="later")
    if moment == "after_forward":
        mean_square(trial.ddp, torch.randn(4, 8))
    else:
        at(moment, trial, lambda: None)
    inside = trial.ddp.__dict__["_ddp_mp"]
    parts = [
        weakref.ref(part)
        for part in (
            trial.ddp,
            inside,
            inside.plan,
            inside.plan.pool,
            inside.plan.reducer,
            inside.plan.backward,
            inside.forward,
        )
    ]
    engines = [weakref.ref(group) for group in inside.plan.pool.groups]
    module, oracle = trial.module, trial.oracle
    gc.collect()
    if not collect:
        gc.disable()
    try:
        del trial, inside
        if collect:
            gc.collect()
            assert [ref() for ref in parts + engines] == [None] * (len(parts) + len(engines))
    finally:
        gc.enable()
    gc.collect()
    for got, want in zip(module.parameters(), oracle.module.parameters(), strict=True):
        require_same("master", got, want)
    require_ordinary(module)


@on_ranks(1)
@pytest.mark.parametrize("backward", ["none", "once", "kept"])
@pytest.mark.parametrize("full", [(), (nn.Tanh, "2")], ids=["low", "full"])
def test_module_that_keeps_its_output_goes_with_its_wrapper(rank: Rank, backward: str, full: tuple[Any, ...]) -> None:
    """The output's graph keeps what its backward needs of us: were the module part of that, nothing would ever free it."""
    model = mlp(8, 3)
    model.register_forward_hook(lambda module, _, output: module.__dict__.__setitem__("output", output))
    options = ddp_mp.Options(full_precision_modules=full, wait="module", first_bucket_mb=2**-12, bucket_mb=2**-12)
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=MIXED, options=options)
    for _ in range(2):
        loss = ddp(torch.randn(4, 8)).float().square().mean()
        if backward != "none":
            loss.backward(retain_graph=backward == "kept")
    gone = weakref.ref(model)
    del model, ddp, loss
    gc.collect()
    assert gone() is None


# --- what is process-wide ------------------------------------------------------------------------------------------------


def process_wide_hooks() -> list[int]:
    """How many hooks for all modules and optimizers there are."""
    return [
        len(of_module._global_parameter_registration_hooks),
        len(of_module._global_module_registration_hooks),
        len(of_optimizer._global_optimizer_pre_hooks),
        len(of_optimizer._global_optimizer_post_hooks),
    ]


@on_ranks(2)
def test_hooks_of_the_process_go_with_the_last_model(rank: Rank) -> None:
    gc.collect()
    before = process_wide_hooks()
    kept = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)
    present = process_wide_hooks()
    for unpatched in (False, True):
        ddp = ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)
        square_step(ddp, torch.randn(4, 8))
        if unpatched:
            ddp_mp.unpatch(ddp)
        del ddp
        gc.collect()
        assert process_wide_hooks() == present, "another model is patched"
    del kept
    gc.collect()
    assert process_wide_hooks() == before == [0, 0, 0, 0]


@on_ranks(2)
def test_hooks_of_the_process_stay_while_pytorch_goes_through_them(rank: Rank) -> None:
    models = [ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED)]
    hooks = (lambda *_: models.clear(), lambda *_: None)  # as if the collector ran in the first
    handles = [of_module.register_module_parameter_registration_hook(hook) for hook in hooks]
    try:
        nn.Linear(1, 1)
        assert not models
    finally:
        for handle in handles:
            handle.remove()
    ddp_mp.unpatch(ddp_mp.patch(DistributedDataParallel(mlp()), mixed_precision=MIXED))
    assert process_wide_hooks() == [0, 0, 0, 0]


# --- install -------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_install_patches_models_built_later_until_uninstalled(rank: Rank) -> None:
    original = DistributedDataParallel.__init__
    ddp_mp.install()
    try:
        ddp = DistributedDataParallel(scalar(), mixed_precision=MIXED)
        positional = DistributedDataParallel(scalar(), mixed_precision=_MixedPrecision(FP16, F32, None))
        plain = DistributedDataParallel(scalar())
    finally:
        ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original
    assert [ddp_mp.is_patched(d) for d in (ddp, positional, plain)] == [True, True, False]
    assert not ddp_mp.is_patched(DistributedDataParallel(scalar(), mixed_precision=MIXED))
    assert ddp.mixed_precision is None, "inputs are cast where the module is called"
    for model in (ddp, positional):
        model(column(3)).sum().backward()
        assert model.module.weight.grad.item() == 3


@on_ranks(2)
def test_install_twice_uses_the_later_options_and_one_uninstall_ends_it(rank: Rank) -> None:
    original = DistributedDataParallel.__init__
    for mb in (3, 7):
        ddp_mp.install(ddp_mp.Options(bucket_mb=mb))
    ddp = DistributedDataParallel(scalar(), mixed_precision=MIXED)
    ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original
    ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original
    assert bucket_mb(ddp) == 7


def bucket_mb(ddp: DistributedDataParallel) -> float | None:
    """What a model was patched with; None: it is not patched."""
    return ddp.__dict__["_ddp_mp"].options.bucket_mb if ddp_mp.is_patched(ddp) else None


def built() -> float | None:
    """What a model that is built now is patched with."""
    return bucket_mb(DistributedDataParallel(scalar(), mixed_precision=MIXED))


@on_ranks(2)
def test_install_nested_ends_with_what_was_in_force_before(rank: Rank) -> None:
    original = DistributedDataParallel.__init__
    with ddp_mp.install(ddp_mp.Options(bucket_mb=3)):
        with ddp_mp.install(ddp_mp.Options(bucket_mb=7)):
            assert built() == 7
        assert built() == 3
        ddp_mp.install(ddp_mp.Options(bucket_mb=5))  # replaces, and ends with the block
        assert built() == 5
    assert DistributedDataParallel.__init__ is original
    ddp_mp.install(ddp_mp.Options(bucket_mb=3))
    with pytest.raises(Luck), ddp_mp.install(ddp_mp.Options(bucket_mb=7), mixed_precision=MIXED):
        no_luck()
    assert built() == 3
    assert bucket_mb(DistributedDataParallel(scalar())) is None
    with ddp_mp.install(ddp_mp.Options(bucket_mb=7)):
        ddp_mp.uninstall()
        assert DistributedDataParallel.__init__ is original
    assert DistributedDataParallel.__init__ is original, "what was ended inside stays ended"


@on_ranks(2)
@pytest.mark.parametrize("named", [True, False])
def test_install_around_and_below_a_wrapper_of_another_library(rank: Rank, named: bool) -> None:
    original: Any = DistributedDataParallel.__init__
    calls: list[Any] = []

    def wrap(inner: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            calls.append(kwargs.get("mixed_precision"))
            inner(self, *args, **kwargs)

        return functools.wraps(inner)(init) if named else init

    try:
        ddp_mp.install(ddp_mp.Options(bucket_mb=3))
        other = wrap(DistributedDataParallel.__init__)
        DistributedDataParallel.__init__ = other  # type: ignore[method-assign]
        assert built() == 3
        assert calls.pop() is MIXED
        ddp_mp.uninstall()
        assert DistributedDataParallel.__init__ is other
        assert built() is None
        assert calls.pop() is MIXED
        for _ in range(2):  # again: ours is below the other one, and around it
            ddp_mp.install(ddp_mp.Options(bucket_mb=5))
            ddp = DistributedDataParallel(scalar(), mixed_precision=MIXED)
            assert bucket_mb(ddp) == 5
            assert calls == [None]
            calls.clear()
            assert ddp_mp.unpatch(ddp).mixed_precision is MIXED
        ddp_mp.uninstall()
        assert DistributedDataParallel.__init__ is other
        assert built() is None
    finally:
        DistributedDataParallel.__init__ = original  # type: ignore[method-assign]
        ddp_mp.uninstall()
    assert DistributedDataParallel.__init__ is original


@on_ranks(2)
def test_install_unpatched_model_has_pytorchs_mixed_precision(rank: Rank) -> None:
    with ddp_mp.install():
        ddp = DistributedDataParallel(mlp(), mixed_precision=MIXED)
        assert ddp.mixed_precision is None, "inputs are cast where the module is called"
    ddp_mp.unpatch(ddp)
    assert ddp.mixed_precision is MIXED
    assert all(p._mp_param.dtype is BF16 for p in ddp.module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("hooks", ["all", "root"])
def test_install_with_precision_patches_models_built_without(rank: Rank, hooks: str) -> None:
    fp16 = ddp_mp.MixedPrecision(FP16, F32)
    with ddp_mp.install(ddp_mp.Options(hooks=hooks), mixed_precision=MIXED):  # type: ignore[arg-type]
        plain = DistributedDataParallel(mlp())
        own = DistributedDataParallel(mlp(), mixed_precision=fp16)
    assert ddp_mp.is_patched(plain)
    if hooks == "all":
        assert own(torch.randn(2, 8)).dtype is FP16
        assert plain(torch.randn(2, 8)).dtype is BF16
    assert ddp_mp.is_patched(own)
    assert not ddp_mp.is_patched(DistributedDataParallel(mlp()))


@on_ranks(2)
def test_install_with_precision_unpatched_model_is_in_full_precision(rank: Rank) -> None:
    with ddp_mp.install(mixed_precision=MIXED):
        ddp = DistributedDataParallel(scalar())
    assert ddp(column(3)).dtype is BF16
    ddp_mp.unpatch(ddp)
    assert ddp.mixed_precision is None
    assert ddp(column(3)).dtype is F32


@on_ranks(2)
def test_install_validates_before_the_wrapper_is_built(rank: Rank) -> None:
    with pytest.raises(TypeError, match="mixed_precision"):
        ddp_mp.install(mixed_precision=BF16)  # type: ignore[arg-type]
    for options in ("all", {}, 0, False):
        with pytest.raises(TypeError, match="Options"):
            ddp_mp.install(options)  # type: ignore[arg-type]
    with ddp_mp.install(), pytest.raises(TypeError, match="mixed_precision"):
        DistributedDataParallel(scalar(), mixed_precision="bf16")


# --- what is validated ---------------------------------------------------------------------------------------------------


#: options -> those that are said to have no effect where nothing is cast
HOW_TO_CAST: list[tuple[dict[str, Any], str]] = [
    ({"wait": "module"}, "wait"),
    ({"prefetch": True}, "prefetch"),
    ({"reuse_unchanged": True, "prefetch": True}, "prefetch, reuse_unchanged"),
    ({"full_precision_modules": ("0",), "full_precision_outputs": ("0",)}, ""),
    ({"bucket_mb": 3, "output_dtype": F32}, ""),
]


@on_ranks(2)
@pytest.mark.parametrize(("options", "names"), HOW_TO_CAST)
def test_options_of_how_to_cast_are_warned_of_where_nothing_is_cast(rank: Rank, options: dict[str, Any], names: str) -> None:
    for param_dtype in (BF16, None):
        ddp = DistributedDataParallel(mlp())
        precision = ddp_mp.MixedPrecision(param_dtype, F32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp_mp.patch(ddp, mixed_precision=precision, options=ddp_mp.Options(**options))
            ddp_mp.patch(ddp)
        said = [str(w.message) for w in caught]
        if param_dtype is BF16 or not names:
            assert said == []
        else:
            assert said == [f"ddp_mp.patch: Options without effect: {names}; param_dtype is None, so that no parameter is cast"]
            assert caught[0].filename == __file__


@on_ranks(2)
def test_patch_with_nothing_to_do_is_an_error_that_says_so(rank: Rank) -> None:
    for precision in (ddp_mp.MixedPrecision(), _MixedPrecision()):
        ddp = DistributedDataParallel(scalar())
        with pytest.raises(ValueError, match=r"param_dtype, reduce_dtype and buffer_dtype .* are all None"):
            ddp_mp.patch(ddp, mixed_precision=precision)
        assert not ddp_mp.is_patched(ddp)
    with ddp_mp.install(), pytest.raises(ValueError, match="are all None"):
        DistributedDataParallel(scalar(), mixed_precision=_MixedPrecision())
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        precision = ddp_mp.MixedPrecision(**{field: BF16})
        assert ddp_mp.is_patched(ddp_mp.patch(DistributedDataParallel(scalar()), mixed_precision=precision))


@on_ranks(2)
def test_patch_by_position_says_how_to_write_it(rank: Rank) -> None:
    with pytest.raises(TypeError, match=r"write ddp_mp.patch\(ddp, mixed_precision="):
        ddp_mp.patch(DistributedDataParallel(scalar()), MIXED)


@on_ranks(1)
@pytest.mark.parametrize("part", [True, False])
def test_patch_of_a_wrapper_around_a_wrapper_is_refused_and_leaves_the_model(rank: Rank, part: bool) -> None:
    inner = DistributedDataParallel(mlp())
    ddp = DistributedDataParallel(nn.Sequential(inner) if part else inner)
    with pytest.raises(RuntimeError, match="module '0', which is" if part else "the wrapped module, which is"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    assert not ddp_mp.is_patched(ddp)
    ddp_mp.patch(inner, mixed_precision=MIXED)  # a patched model wrapped once more would be reduced twice
    mean_square(inner, torch.ones(2, 8)).backward()


@on_ranks(2)
def test_patch_of_a_scripted_part_is_refused_and_leaves_the_model(rank: Rank) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and still used
        model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    ddp = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"module '1', which torch\.jit\.script made"):
        ddp_mp.patch(ddp, mixed_precision=MIXED)
    ddp(torch.randn(2, 8)).sum().backward()


@on_ranks(2)
def test_copy_shallow_of_a_patched_wrapper_is_an_error_that_says_what_to_do(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    with pytest.raises(TypeError, match=r"use copy\.deepcopy, or ddp_mp\.unpatch"):
        copy.copy(trial.ddp)
    trial.train(vectors())
    assert copy.deepcopy(trial.ddp) is not trial.ddp
    shallow = copy.copy(trial.module)
    assert "__getstate__" not in shallow.__dict__
    assert not shallow._forward_pre_hooks


@on_ranks(2)
def test_copies_of_containers_before_the_first_forward_are_ordinary_when_modules_wait(rank: Rank) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    trial = Trial(rank, model, options={"wait": "module", "first_bucket_mb": 1e-5, "bucket_mb": 1e-5})
    for part in (model[0], model[0][1], model):
        require_ordinary(copy.deepcopy(part))
        require_ordinary(pickle.loads(pickle.dumps(part)))
    trial.train(vectors())


def test_mixed_precision_validates_its_fields() -> None:
    assert isinstance(ddp_mp.MixedPrecision(), _MixedPrecision)
    chosen = ddp_mp.MixedPrecision(BF16, F32, FP16)
    assert (chosen.param_dtype, chosen.reduce_dtype, chosen.buffer_dtype) == (BF16, F32, FP16)
    with pytest.raises(TypeError, match=r"param_dtype.*'bf16'"):
        ddp_mp.MixedPrecision("bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"reduce_dtype.*int32"):
        ddp_mp.MixedPrecision(BF16, torch.int32)
    with pytest.raises(ValueError, match=r"buffer_dtype.*complex64"):
        ddp_mp.MixedPrecision(BF16, F32, torch.complex64)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("hooks", "none", ValueError),
        ("wait", "never", ValueError),
        ("bucket_mb", 0, ValueError),
        ("bucket_mb", -1.0, ValueError),
        ("bucket_mb", float("nan"), ValueError),
        ("first_bucket_mb", float("inf"), ValueError),
        ("first_bucket_mb", "1", TypeError),
        ("first_bucket_mb", True, TypeError),
        ("prefetch", 1, TypeError),
        ("reuse_unchanged", "yes", TypeError),
    ],
)
def test_options_validate_their_fields(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"Options\.{field}"):
        ddp_mp.Options(**{field: value})


def test_options_are_frozen_and_compare_by_value() -> None:
    options = ddp_mp.Options(bucket_mb=3)
    assert options == ddp_mp.Options(bucket_mb=3.0)
    with pytest.raises(AttributeError):
        options.bucket_mb = 4  # type: ignore[misc]
    assert (ddp_mp.Options(bucket_mb=1e-9).bucket_bytes, options.bucket_bytes) == (1, 3 * 2**20)
