"""Errors of the user in a forward, a backward or a hook, and what is refused there: masters stay, a retry equals the oracle."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from kit.modules import Two, mlp, vectors
from kit.oracle import Trial, mean_square, require_same, square_step
from kit.ranks import Rank, on_ranks

import ddp_mp


class Flaky(Two):
    """Raises an error in its next forward or backward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: str | None = None
        self.error: type[BaseException] = ValueError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x).tanh()
        if self.fail == "forward":
            self.fail = None
            raise self.error("no luck")
        if self.fail == "backward":
            self.fail = None
            hidden.register_hook(self._raise)
        return self.b(hidden)

    def _raise(self, grad: torch.Tensor) -> None:
        raise self.error("no luck")


@on_ranks(2)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("grad", [True, False])
def test_error_in_forward_leaves_masters_and_the_retry_equals_oracle(
    rank: Rank, error: type[BaseException], grad: bool
) -> None:
    trial = Trial(rank, Flaky())
    for seed in range(3):
        trial.module.fail, trial.module.error = "forward", error
        with pytest.raises(error), torch.set_grad_enabled(grad):
            trial.ddp(torch.randn(4, 8))
        trial.module.state_dict()
        trial.check()
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kept", [False, True])
def test_error_in_backward_on_all_ranks_leaves_masters_and_gradients(
    rank: Rank, error: type[BaseException], kept: bool
) -> None:
    trial = Trial(rank, Flaky(), bucket_cap_mb=0.0001)
    for seed in range(3):
        if kept:
            trial.backward(square_step, rank.inputs(vectors(), 10 + seed))
        trial.module.fail, trial.module.error = "backward", error
        loss = mean_square(trial.ddp, torch.randn(4, 8))
        with pytest.raises(error):
            loss.backward()
        with ddp_mp.full_precision(trial.ddp):
            trial.check()  # also the gradients of before
        trial.backward(square_step, rank.inputs(vectors(), seed))
        trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_error_in_a_hook_of_the_user_leaves_masters_and_the_retry_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for place in ("pre", "post", "grad"):

        def fail(*args: Any) -> None:
            raise ValueError("no luck")

        handle = {
            "pre": lambda: trial.module.register_forward_pre_hook(fail),
            "post": lambda: trial.module[2].register_forward_hook(fail),
            "grad": lambda: trial.module[0].weight.register_hook(fail),
        }[place]()
        with pytest.raises(ValueError, match="no luck"):
            mean_square(trial.ddp, torch.randn(4, 8)).backward()
        handle.remove()
        with ddp_mp.full_precision(trial.ddp):
            trial.check()
        trial.backward(square_step, rank.inputs(vectors(), 1))
        trial.check()
        trial.zero_grad()


@on_ranks(2)
def test_error_on_one_rank_in_forward_then_retry_on_that_rank_equals_oracle(rank: Rank) -> None:
    trial = Trial(rank, Flaky())
    trial.module.fail = "forward" if rank.index == 1 else None
    xs = rank.inputs(vectors())
    for _ in range(1 + rank.index):
        with contextlib.suppress(ValueError):
            square_step(trial.ddp, xs[rank.index])
    trial.oracle.backward(square_step, xs)
    trial.check()


@on_ranks(2)
def test_error_while_another_is_handled_does_not_confuse_a_forward(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    for seed in range(3):
        try:
            raise ValueError("outer")
        except ValueError:
            trial.backward(square_step, rank.inputs(vectors(), seed))
            trial.check()
        trial.zero_grad()


@on_ranks(1)
@pytest.mark.parametrize("place", [0, 1])
def test_interrupt_while_memory_of_leaves_is_given_back_leaves_masters_and_the_retry_equals_oracle(
    rank: Rank, place: int
) -> None:
    trial = Trial(rank, mlp(), options={"first_bucket_mb": 1e-6, "bucket_mb": 1e-6})
    trial.train(vectors())
    (generation,) = trial.ddp.__dict__["_ddp_mp"].plan.pool.generations
    assert not generation.allocated
    resize, nbytes = generation._resize[place]

    def interrupted(size: int) -> None:
        resize(size)
        if size == 0:
            generation._resize[place] = resize, nbytes
            raise KeyboardInterrupt

    generation._resize[place] = interrupted, nbytes
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        trial.ddp(torch.randn(4, 8))
    trial.check()
    trial.train(vectors())


@on_ranks(2)
def test_optimizer_step_inside_a_backward_steps_masters(rank: Rank) -> None:
    model = mlp()
    trial = Trial(rank, model)
    optimizer = torch.optim.SGD([model[2].bias], lr=0.5)
    seen: list[torch.Tensor] = []

    def step(bias: torch.Tensor) -> None:
        seen.append(bias.grad.clone())
        optimizer.step()

    before = model[2].bias.detach().clone()
    handle = model[2].bias.register_post_accumulate_grad_hook(step)
    xs = rank.inputs(vectors())
    trial.backward(square_step, xs)
    handle.remove()
    for name, param in model.named_parameters():
        require_same(f"gradient of {name}", param.grad, trial.oracle.grads[rank.index][name])
    require_same("stepped", model[2].bias, before - 0.5 * seen[0])


class Trains(Two):
    """Runs the backward itself, as Lightning's manual optimization does."""

    def forward(self, x: torch.Tensor) -> None:
        super().forward(x).float().square().mean().backward()


@on_ranks(2)
def test_backward_inside_a_forward_computes_its_gradients(rank: Rank) -> None:
    model = Trains()
    trial = Trial(rank, model)
    for seed in range(2):
        xs = rank.inputs(vectors(), seed)
        trial.ddp(xs[rank.index])
        trial.oracle.backward(lambda call, x: call(x), xs, sync=False)
        trial.check()  # plain DDP does not reduce it either: nobody said that a backward comes
    trial.zero_grad()
    model.forward = functools.partial(Two.forward, model)
    trial.oracle.module.forward = functools.partial(Two.forward, trial.oracle.module)
    trial.backward(square_step, rank.inputs(vectors()))
    trial.check()
