"""What is asked of a model while a backward of it is under way: in a hook, or in another thread."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules import Two
from oracle import BF16, F32, Trial, require_same, square_step
from ranks import Rank, on_ranks

import ddp_mp


class Stops(torch.autograd.Function):
    """Runs something in the middle of a backward."""

    between: Callable[[], None] | None = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Stops.between is not None:
            Stops.between()
        return grad


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


def backward_with(trial: Trial, rank: Rank, act: Callable[[], None], seed: int = 0) -> None:
    """A training step that does ``act`` in the middle of its backward, and must come out right."""
    Stops.between = act
    try:
        trial.backward(square_step, rank.inputs(lambda: torch.randn(4, 8), seed))
    finally:
        Stops.between = None
    trial.check()


def only_once(act: Callable[[], None], trial: Trial) -> Callable[[], None]:
    """Not for the oracle, which runs the same module."""
    return lambda: act() if trial.module.a.weight.dtype is BF16 else None


@on_ranks(2)
@WHERE
@pytest.mark.parametrize("accumulated", [False, True])
def test_state_dict_gives_masters_and_disturbs_nothing(rank: Rank, where: Any, accumulated: bool) -> None:
    trial = Trial(rank, Halves())
    if accumulated:
        trial.backward(square_step, rank.inputs(lambda: torch.randn(4, 8), 7))
    masters = {name: value.clone() for name, value in trial.ddp.state_dict().items()}
    seen: list[dict[str, torch.Tensor]] = []
    backward_with(trial, rank, only_once(lambda: seen.append(where(trial.ddp.state_dict)), trial))
    assert len(seen) == 1
    for name, master in masters.items():
        require_same(name, seen[0][name], master)
        assert not seen[0][name].requires_grad
    with torch.no_grad():
        trial.module.a.weight.add_(1)
    assert torch.equal(seen[0]["module.a.weight"], trial.module.a.weight), "a state dict is of the masters' own memory"


@on_ranks(2)
@WHERE
def test_state_dict_with_variables_gives_the_parameters(rank: Rank, where: Any) -> None:
    trial = Trial(rank, Halves())
    seen: list[dict[str, Any]] = []
    backward_with(trial, rank, only_once(lambda: seen.append(where(lambda: trial.module.state_dict(keep_vars=True))), trial))
    assert all(seen[0][name] is param for name, param in trial.module.named_parameters())


ACTS: dict[str, tuple[Callable[[Trial], Any], str]] = {
    "load": (lambda trial: trial.module.load_state_dict(trial.oracle.module.state_dict()), "was loaded while a backward"),
    "copy": (lambda trial: copy.deepcopy(trial.module), "was copied while a backward"),
    "copy_part": (lambda trial: copy.deepcopy(trial.module.a), "was copied while a backward"),
    "copy_wrapper": (lambda trial: copy.deepcopy(trial.ddp), "was copied while a backward"),
    "step": (lambda trial: torch.optim.SGD(trial.module.parameters(), lr=0.1).step(), "an optimizer stepped"),
    "unpatch": (lambda trial: ddp_mp.unpatch(trial.ddp), "under way"),
}


@on_ranks(2)
@WHERE
@pytest.mark.parametrize("name", ACTS)
def test_what_needs_masters_is_an_error_and_disturbs_nothing(rank: Rank, where: Any, name: str) -> None:
    trial = Trial(rank, Halves())
    act, message = ACTS[name]
    errors: list[BaseException] = []

    def attempt() -> None:
        with pytest.raises(RuntimeError, match=message) as error:
            where(lambda: act(trial))
        errors.append(error.value)

    backward_with(trial, rank, only_once(attempt, trial))
    assert len(errors) == 1
    assert trial.module.a.weight.dtype is F32
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
    where(lambda: ACTS[name][0](trial))
    trial.zero_grad()
    trial.train(lambda: torch.randn(4, 8), steps=2)
