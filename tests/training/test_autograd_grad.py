"""``torch.autograd.grad`` with respect to parameters: once or several times, of higher order, and what is done with the result.

What is due is what the same program gives on a copy of the module in low precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.modules import Saved, mlp, vectors
from kit.oracle import BF16, F32, F64, Trial, mean_square, require_same
from kit.ranks import Rank, on_ranks
from torch import nn

import ddp_mp

ORIGINAL = torch.autograd._engine_run_backward
Tensors = Sequence[torch.Tensor]
Program = Callable[[Callable[[torch.Tensor], torch.Tensor], list[nn.Parameter], torch.Tensor], Tensors]


def losses(output: torch.Tensor) -> list[torch.Tensor]:
    """Of three tasks that share everything."""
    output = output.float()
    return [output.square().mean(), output[:, :3].sum(), output.abs().mean()]


def of_each_task(call: Callable[[torch.Tensor], torch.Tensor], params: list[nn.Parameter], x: torch.Tensor) -> Tensors:
    tasks = losses(call(x))
    return [grad for task in tasks for grad in torch.autograd.grad(task, params, retain_graph=True)]


def of_each_task_the_last_frees_the_graph(
    call: Callable[[torch.Tensor], torch.Tensor], params: list[nn.Parameter], x: torch.Tensor
) -> Tensors:
    tasks = losses(call(x))
    return [grad for k, task in enumerate(tasks) for grad in torch.autograd.grad(task, params, retain_graph=k < 2)]


def of_second_order(call: Callable[[torch.Tensor], torch.Tensor], params: list[nn.Parameter], x: torch.Tensor) -> Tensors:
    grads = torch.autograd.grad(losses(call(x))[0], params, create_graph=True)
    return torch.autograd.grad(sum(grad.sum() for grad in grads), params)


def of_a_step(call: Callable[[torch.Tensor], torch.Tensor], params: list[nn.Parameter], x: torch.Tensor) -> Tensors:
    """A loss at parameters to which one step of gradient descent leads, differentiated through the step."""
    grads = torch.autograd.grad(losses(call(x))[0], params, create_graph=True)
    w = [param - 0.1 * grad for param, grad in zip(params, grads, strict=True)]
    hidden = F.linear(x.to(w[0].dtype), w[0], w[1]).tanh()
    return torch.autograd.grad(losses(F.linear(hidden, w[2], w[3]).tanh())[0], params)


PROGRAMS: list[Program] = [of_each_task, of_each_task_the_last_frees_the_graph, of_second_order, of_a_step]


def of_masters(module: nn.Module, dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[nn.Parameter]]:
    """A call that casts masters inside autograd, and the masters: gradients of these have the masters' type."""
    masters = copy.deepcopy(module)

    def call(x: torch.Tensor) -> torch.Tensor:
        casts = {name: param.to(dtype) for name, param in masters.named_parameters()}
        return torch.func.functional_call(masters, casts, (x.to(dtype),))

    return call, list(masters.parameters())


@on_ranks(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_asked_for_are_those_of_the_leaves(rank: Rank, program: Program) -> None:
    trial = Trial(rank, mlp())
    params = list(trial.module.parameters())
    for seed in range(3):
        x = rank.inputs(vectors(), seed)[rank.index]
        due = program(*of_masters(trial.oracle.module, BF16), x)
        for got, want in zip(program(trial.ddp, params, x), due, strict=True):
            require_same("gradient", got, want)
        assert all(param.grad is None for param in params)
        trial.train(vectors(), steps=1, seed=10 * seed)  # and training goes on as if nothing had been asked
    assert {param.dtype for param in params} == {F32}


@on_ranks(2)
@pytest.mark.parametrize("own_backward", [True, False])
def test_loss_after_a_step_is_reduced_with_its_gradient_through_the_step(rank: Rank, own_backward: bool) -> None:
    trial = Trial(rank, mlp())
    params = list(trial.module.parameters())

    def meta(call: Callable[[torch.Tensor], torch.Tensor], params: list[nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        first = losses(call(x))[0]
        grads = torch.autograd.grad(first, params, create_graph=True)
        w = [param - 0.1 * grad for param, grad in zip(params, grads, strict=True)]
        later = losses(F.linear(F.linear(x.to(w[0].dtype), w[0], w[1]).tanh(), w[2], w[3]).tanh())[0]
        return later if own_backward else first + later

    found = []
    for x in rank.inputs(vectors()):
        call, masters = of_masters(trial.oracle.module, BF16)
        meta(call, masters, x).backward()
        found.append([param.grad for param in masters])
    meta(trial.ddp, params, rank.inputs(vectors())[rank.index]).backward()
    for param, *grads in zip(params, *found, strict=True):
        require_same("gradient", param.grad, sum(grads, torch.zeros(())) / 2)
        assert param.dtype is F32


@on_ranks(2)
@pytest.mark.parametrize("kept", [True, False])
def test_gradients_set_by_hand_are_stepped_on_in_full_precision(rank: Rank, kept: bool) -> None:
    trial = Trial(rank, mlp())
    params = list(trial.module.parameters())
    before = [param.detach().clone() for param in params]
    loss = mean_square(trial.ddp, torch.ones(4, 8))
    grads = torch.autograd.grad(loss, params, retain_graph=kept)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    torch.optim.SGD(params, lr=0.5).step()
    for param, old, grad in zip(params, before, grads, strict=True):
        require_same("gradient", param.grad, grad.float())
        require_same("parameter", param, old - 0.5 * grad.float())


@on_ranks(2)
def test_gradients_of_before_are_there_while_others_are_asked_for(rank: Rank) -> None:
    trial = Trial(rank, mlp())
    trial.backward(lambda call, x: mean_square(call, x).backward(), rank.inputs(vectors()))
    before = [param.grad.clone() for param in trial.module.parameters()]
    output = trial.ddp(torch.ones(4, 8))
    torch.autograd.grad(losses(output)[0], list(trial.module.parameters()), retain_graph=True)
    for param, grad in zip(trial.module.parameters(), before, strict=True):
        require_same("gradient", param.grad, grad)
    losses(output)[0].backward()
    trial.zero_grad()
    trial.train(vectors(), steps=2)


# --- after something that may have looked at the masters -----------------------------------------------------------------


def after_a_backward(trial: Trial, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)


def after_two_backwards(trial: Trial, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def after_a_state_dict(trial: Trial, loss: torch.Tensor) -> None:
    trial.ddp.state_dict()


def after_an_evaluation(trial: Trial, loss: torch.Tensor) -> None:
    with torch.no_grad():
        trial.ddp(torch.ones(4, 8))


def first_order(tasks: list[torch.Tensor], params: list[nn.Parameter]) -> Tensors:
    return [grad for task in tasks for grad in torch.autograd.grad(task, params, retain_graph=True)]


def second_order(tasks: list[torch.Tensor], params: list[nn.Parameter]) -> Tensors:
    """As GradNorm: the norms of the tasks' gradients, balanced."""
    grads = [torch.autograd.grad(task, params, retain_graph=True, create_graph=True) for task in tasks]
    norms = [sum((grad.float().square().sum() for grad in several), torch.zeros(())) for several in grads]
    return torch.autograd.grad((norms[0] - norms[1]).abs() + norms[2], params, retain_graph=True)


@on_ranks(2)
@pytest.mark.parametrize("model", [mlp, Saved])
@pytest.mark.parametrize("program", [first_order, second_order])
@pytest.mark.parametrize("before", [after_a_backward, after_two_backwards, after_a_state_dict, after_an_evaluation])
def test_gradients_asked_for_of_a_graph_of_before_are_those_of_the_leaves(
    rank: Rank, before: Any, program: Any, model: Any
) -> None:
    trial = Trial(rank, model().double(), ddp_mp.MixedPrecision(F32, F64))  # of second order, bfloat16 leaves no digit
    params = list(trial.module.parameters())
    for seed in range(3):
        x = rank.inputs(vectors(), seed)[rank.index]
        call, masters = of_masters(trial.oracle.module, F32)
        due = program(losses(call(x)), masters)
        tasks = losses(trial.ddp(x))
        before(trial, sum(tasks, torch.zeros(())))
        accumulated = [None if param.grad is None else param.grad.clone() for param in params]
        got = program(tasks, params)
        if program is first_order:
            for a, b in zip(got, due, strict=True):
                require_same("gradient", a, b)
        else:  # summed in another order: some are nothing but what was rounded
            require_same("gradients", *(torch.cat([grad.flatten() for grad in grads]) for grads in (got, due)), tolerance=1e-4)
        for param, grad in zip(params, accumulated, strict=True):
            require_same("gradient", param.grad, grad)
        del tasks
        trial.zero_grad()
        trial.train(vectors(), steps=1, seed=10 * seed)
    ddp_mp.unpatch(trial.ddp)
    assert torch.autograd._engine_run_backward is ORIGINAL
    assert {param.dtype for param in params} == {F64}


@on_ranks(2)
@pytest.mark.parametrize("before", [after_a_state_dict, after_an_evaluation])
@pytest.mark.parametrize("model", [mlp, Saved])
def test_penalty_on_gradients_of_a_graph_of_before_is_reduced_with_the_loss(rank: Rank, before: Any, model: Any) -> None:
    trial = Trial(rank, model(), bucket_cap_mb=0.00001)  # a bucket a parameter
    params = list(trial.module.parameters())

    def penalised(loss: torch.Tensor, params: list[nn.Parameter]) -> torch.Tensor:
        grads = torch.autograd.grad(loss, params, create_graph=True)
        return loss + sum((grad.float().square().sum() for grad in grads), torch.zeros(()))

    found = []
    for x in rank.inputs(vectors()):
        low = copy.deepcopy(trial.oracle.module).to(BF16)
        penalised(losses(low(x.to(BF16)))[0], list(low.parameters())).backward()
        found.append([param.grad.float() for param in low.parameters()])
    loss = losses(trial.ddp(rank.inputs(vectors())[rank.index]))[0]
    before(trial, loss)
    penalised(loss, params).backward()
    for param, *grads in zip(params, *found, strict=True):
        require_same("gradient", param.grad, sum(grads, torch.zeros(())) / 2, tolerance=2**-6)
        gathered = rank.gather(param.grad)
        require_same("gradient", gathered[0], gathered[1])
    trial.zero_grad()
    trial.train(vectors())


@on_ranks(2)
@pytest.mark.parametrize("before", [after_a_state_dict, after_an_evaluation])
def test_backward_with_inputs_of_a_graph_of_before_accumulates_there(rank: Rank, before: Any) -> None:
    trial = Trial(rank, mlp(), find_unused_parameters=True)
    first, *others = trial.module.parameters()
    found = []
    for x in rank.inputs(vectors()):
        low = copy.deepcopy(trial.oracle.module).to(BF16)
        losses(low(x.to(BF16)))[0].backward()
        found.append(next(low.parameters()).grad.float())
    loss = losses(trial.ddp(rank.inputs(vectors())[rank.index]))[0]
    before(trial, loss)
    loss.backward(inputs=[first])
    require_same("gradient", first.grad, (found[0] + found[1]) / 2)
    assert all(param.grad is None for param in others)
    trial.zero_grad()
    trial.train(vectors())
