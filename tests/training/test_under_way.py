"""What is asked of a model while a forward or backward of it is under way: in a hook, or in another thread."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.modules import Two
from kit.oracle import BF16, F32, Trial, require_same, square_step
from kit.ranks import Rank, on_ranks
from torch.nn.parallel import DistributedDataParallel

import ddp_mp


class Stops(torch.autograd.Function):
    """Runs something in the middle of a forward or backward."""

    between: Callable[[], None] | None = None
    during = "backward"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Stops.reached("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Stops.reached("backward")
        return grad

    @staticmethod
    def reached(place: str) -> None:
        if Stops.between is not None and Stops.during == place:
            Stops.between()


class Halves(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Stops.apply(self.a(x)))


def in_this_thread(act: Callable[[], Any]) -> Any:
    return act()


def in_another_thread(act: Callable[[], Any]) -> Any:
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


WHERE = pytest.mark.parametrize("where", [in_this_thread, in_another_thread])
DURING = pytest.mark.parametrize("during", ["forward", "backward"])


def step_with(trial: Trial, rank: Rank, act: Callable[[], None], during: str, seed: int = 0) -> None:
    """A training step that does ``act`` in the middle of its forward or backward, and must come out right."""
    Stops.between, Stops.during = act, during
    try:
        trial.backward(square_step, rank.inputs(lambda: torch.randn(4, 8), seed))
    finally:
        Stops.between, Stops.during = None, "backward"
    trial.check()


def only_once(act: Callable[[], None], trial: Trial) -> Callable[[], None]:
    """Not for the oracle, which runs the same module."""
    return lambda: act() if trial.module.a.weight.dtype is BF16 else None


@on_ranks(2)
@WHERE
@DURING
@pytest.mark.parametrize("accumulated", [False, True])
def test_state_dict_gives_masters_and_disturbs_nothing(rank: Rank, where: Any, during: str, accumulated: bool) -> None:
    trial = Trial(rank, Halves())
    if accumulated:
        trial.backward(square_step, rank.inputs(lambda: torch.randn(4, 8), 7))
    masters = {name: value.clone() for name, value in trial.ddp.state_dict().items()}
    seen: list[dict[str, torch.Tensor]] = []
    step_with(trial, rank, only_once(lambda: seen.append(where(trial.ddp.state_dict)), trial), during)
    assert len(seen) == 1
    for name, master in masters.items():
        require_same(name, seen[0][name], master)
        assert not seen[0][name].requires_grad
    with torch.no_grad():
        trial.module.a.weight.add_(1)
    assert torch.equal(seen[0]["module.a.weight"], trial.module.a.weight), "a state dict is of the masters' own memory"


@on_ranks(2)
@WHERE
@DURING
def test_state_dict_with_variables_gives_the_parameters(rank: Rank, where: Any, during: str) -> None:
    trial = Trial(rank, Halves())
    seen: list[dict[str, Any]] = []
    act = only_once(lambda: seen.append(where(lambda: trial.module.state_dict(keep_vars=True))), trial)
    step_with(trial, rank, act, during)
    assert all(seen[0][name] is param for name, param in trial.module.named_parameters())


ACTS: dict[str, Callable[[Trial], Any]] = {
    "load": lambda trial: trial.module.load_state_dict(trial.oracle.module.state_dict()),
    "copy": lambda trial: copy.deepcopy(trial.module),
    "copy_part": lambda trial: copy.deepcopy(trial.module.a),
    "copy_wrapper": lambda trial: copy.deepcopy(trial.ddp),
    "pickle": lambda trial: pickle.loads(pickle.dumps(trial.module.a)),
    "step": lambda trial: torch.optim.SGD(trial.module.parameters(), lr=0.0).step(),
}


@on_ranks(2)
@WHERE
@DURING
@pytest.mark.parametrize("name", ACTS)
def test_what_uses_masters_has_them_and_disturbs_nothing(rank: Rank, where: Any, during: str, name: str) -> None:
    trial = Trial(rank, Halves())
    masters = {key: value.clone() for key, value in trial.module.state_dict().items()}
    made: list[Any] = []
    step_with(trial, rank, only_once(lambda: made.append(where(lambda: ACTS[name](trial))), trial), during)
    assert len(made) == 1
    if isinstance(made[0], torch.nn.Module):
        for key, value in made[0].state_dict().items():
            whole = key.removeprefix("module.") if "." in key else f"a.{key}"
            require_same(key, value, masters[whole])
        assert all(p.dtype is F32 for p in made[0].parameters())
        for module in made[0].modules():
            assert not set(module._parameters) & set(vars(module)), "a leaf came along"
    assert trial.module.a.weight.dtype is F32
    trial.train(lambda: torch.randn(4, 8), steps=2)


@on_ranks(2)
@WHERE
@DURING
def test_unpatch_is_an_error_and_disturbs_nothing(rank: Rank, where: Any, during: str) -> None:
    trial = Trial(rank, Halves())
    errors: list[BaseException] = []

    def attempt() -> None:
        with pytest.raises(RuntimeError, match="under way") as error:
            where(lambda: ddp_mp.unpatch(trial.ddp))
        errors.append(error.value)

    step_with(trial, rank, only_once(attempt, trial), during)
    assert len(errors) == 1
    trial.train(lambda: torch.randn(4, 8), steps=2)


@on_ranks(2)
@WHERE
@pytest.mark.parametrize("name", ["load", "copy", "step"])
def test_after_a_backward_that_failed_masters_are_there_for_any_thread(rank: Rank, where: Any, name: str) -> None:
    trial = Trial(rank, Halves())

    def fail() -> None:
        raise ValueError("no luck")

    Stops.between = fail
    with pytest.raises(ValueError, match="no luck"):
        square_step(trial.ddp, torch.randn(4, 8))
    Stops.between = None
    where(lambda: ACTS[name](trial))
    trial.zero_grad()
    trial.train(lambda: torch.randn(4, 8), steps=2)


class Interrupted(Halves):
    """A forward that Ctrl-C may end; PyTorch then calls no hook."""

    between: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.between is not None:
            self.between()
        return super().forward(x)


@on_ranks(2)
@WHERE
@pytest.mark.parametrize("name", ACTS)
def test_after_a_forward_ended_by_an_interrupt_masters_are_there_for_any_thread(rank: Rank, where: Any, name: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    trial = Trial(rank, Interrupted())
    trial.module.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        trial.ddp(torch.randn(4, 8))
    trial.module.between = None
    assert trial.module.a.weight.dtype is F32
    where(lambda: ACTS[name](trial))
    trial.zero_grad()
    trial.train(lambda: torch.randn(4, 8), steps=2)


@on_ranks(2)
@DURING
def test_full_precision_shows_masters_where_it_is_asked_for_in_the_middle_of_a_forward(rank: Rank, during: str) -> None:
    trial = Trial(rank, Halves())
    seen: list[Any] = []

    def look() -> None:
        with ddp_mp.full_precision(trial.ddp):
            seen.append(trial.module.a.weight.dtype)

    step_with(trial, rank, only_once(look, trial), during)
    assert seen == [F32 if during == "forward" else BF16]


@on_ranks(2)
def test_patch_inside_a_forward_is_an_error_and_disturbs_nothing(rank: Rank) -> None:
    module = Interrupted()
    ddp = DistributedDataParallel(module)
    errors: list[BaseException] = []

    def attempt() -> None:
        with pytest.raises(RuntimeError, match=r"ddp_mp\.patch: a forward or backward of this model is under way") as error:
            ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
        errors.append(error.value)

    x = torch.full((4, 8), float(rank.index))
    for call in (ddp, module):
        module.between = attempt
        call(x).sum().backward()
        module.between = None
    hook = module.register_forward_pre_hook(lambda *_: attempt())  # the forward has begun
    ddp(x).sum().backward()
    hook.remove()
    assert len(errors) == 3
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(BF16, F32))
    assert ddp(torch.randn(4, 8)).dtype is BF16


class Freezes(Two):
    """Freezes one of its weights while it computes, as some adversarial losses do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.weight.requires_grad_(False)
        return super().forward(x)


@on_ranks(2)
def test_weight_frozen_inside_a_forward_is_frozen_and_trains_again_when_it_is_thawed(rank: Rank) -> None:
    model = Freezes()
    ddp = ddp_mp.patch(
        DistributedDataParallel(model, find_unused_parameters=True), mixed_precision=ddp_mp.MixedPrecision(BF16, F32)
    )
    ddp(torch.randn(4, 8)).float().sum().backward()
    assert not model.a.weight.requires_grad
    assert model.a.weight.grad is None
    model.forward = lambda x: Two.forward(model, x)
    model.a.weight.requires_grad_(True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(4, 8)).float().sum().backward()
        assert model.a.weight.grad is not None


class Adapts(Two):
    """Calls a part of itself with other weights, as meta-learning does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted = {"weight": self.a.weight * 2, "bias": self.a.bias * 0}
        hidden = torch.func.functional_call(self.a, adapted, (x,))
        return self.b(hidden) + self.a(x).sum()


@on_ranks(2)
def test_part_called_with_other_weights_inside_a_forward_computes_with_those(rank: Rank) -> None:
    trial = Trial(rank, Adapts())
    trial.tolerance = 2**-6  # sums of low-precision gradients in another order
    for seed in range(2):
        xs = rank.inputs(lambda: torch.randn(4, 8), seed)
        with torch.no_grad(), trial.oracle.low_precision() as call:
            due = call(xs[rank.index])
            require_same("output", trial.ddp(xs[rank.index]), due)
        trial.backward(square_step, xs)
        trial.check()
        trial.zero_grad()
    assert "weight" not in vars(trial.module.a)
