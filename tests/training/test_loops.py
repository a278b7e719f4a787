"""Loops that users write around and inside of forwards: a patched model does what plain DistributedDataParallel does.

Every number here has few bits, so that what bfloat16 computes is exact and equals what float32 computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.modules import column, scalar
from kit.oracle import BF16, F32, patched
from kit.ranks import Rank, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_mp

Wrap = Callable[..., Any]


def chain(*values: float) -> nn.Sequential:
    """Weights one after the other."""
    return nn.Sequential(*map(scalar, values))


def total(*outputs: torch.Tensor) -> torch.Tensor:
    return torch.stack([output.float().sum() for output in outputs]).sum()


def gradients(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def require_as_plain(run: Callable[[Wrap], Any]) -> None:
    """The same of a patched wrapper and of a plain one."""
    due, found = run(DistributedDataParallel), run(patched)
    assert found == due, f"found {found}, plain DistributedDataParallel gives {due}"


# --- weights that are frozen for a while ---------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("between", ["trained", "no_grad"])
def test_frozen_for_a_forward_in_between_and_thawed_again_is_trained(rank: Rank, between: str) -> None:
    def run(wrap: Wrap) -> Any:
        model = chain(2.0, 0.5)
        ddp = wrap(model)
        waiting = ddp(column(rank.index + 1))
        model[0].requires_grad_(False)
        with torch.set_grad_enabled(between == "trained"):
            ddp(column(1))
        model[0].requires_grad_(True)
        asked = torch.autograd.grad(total(waiting), model[0].weight, retain_graph=True)[0].item()
        total(waiting).backward()
        return asked, gradients(model)

    require_as_plain(run)


# --- penalties on weights -------------------------------------------------------------------------------------------------


def squares(model: nn.Module) -> torch.Tensor:
    return total(*(p.square() for p in model.parameters()))


@on_ranks(2)
def test_penalty_computed_before_the_forward_is_part_of_every_gradient(rank: Rank) -> None:
    def run(wrap: Wrap) -> Any:
        model = chain(2.0, 0.5)
        ddp = wrap(model)
        for _ in range(3):
            penalty = squares(model)
            total(ddp(column(rank.index + 1)), penalty).backward()
        return gradients(model)

    require_as_plain(run)


@on_ranks(2)
@pytest.mark.parametrize("start", [0, 2])
def test_penalties_of_two_forwards_are_part_of_their_backward(rank: Rank, start: int) -> None:
    def run(wrap: Wrap) -> Any:
        model = chain(2.0, 0.5)
        ddp = wrap(model)
        for step in range(start + 2):
            first = total(ddp(column(rank.index + 1)), *([squares(model)] if step >= start else []))
            second = total(ddp(column(rank.index + 2)))
            total(first, second).backward()
        return gradients(model)

    require_as_plain(run)


# --- several casts that wait for their backwards ----------------------------------------------------------------------------


@on_ranks(2)
def test_two_forwards_of_a_second_cast_are_backwarded_while_one_of_the_first_waits(rank: Rank) -> None:
    def run(wrap: Wrap) -> Any:
        model = chain(2.0, 0.5)
        ddp = wrap(model)
        with ddp.no_sync():
            waiting = ddp(column(rank.index + 1))
        with torch.no_grad():
            model[1].weight.data = torch.tensor([[4.0]])
        total(ddp(column(1)), ddp(column(rank.index + 2))).backward()
        first = gradients(model)
        total(waiting).backward()
        return first, gradients(model)

    require_as_plain(run)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["tensor", "accumulated"])
def test_hooks_see_the_sum_of_what_two_casts_bring(rank: Rank, kind: str) -> None:
    def run(wrap: Wrap) -> Any:
        model = chain(2.0)
        ddp, seen = wrap(model), []

        def clamped(grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.item())
            return grad.clamp(max=1.0)

        def halved(param: torch.Tensor) -> None:
            seen.append(param.grad.item())
            param.grad.mul_(0.5)

        if kind == "tensor":
            model[0].weight.register_hook(clamped)
        else:
            model[0].weight.register_post_accumulate_grad_hook(halved)
        for _ in range(2):
            first = ddp(column(rank.index + 1))
            model[0].weight.data = model[0].weight.data * 2
            total(first, ddp(column(8))).backward()
        return seen, gradients(model)

    require_as_plain(run)


class Detached(nn.Module):
    """What it returns has no graph, though gradients are recorded: as where an agent acts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = scalar()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).detach()


@on_ranks(1)
def test_forwards_without_a_graph_hold_no_memory_however_many_there_are(rank: Rank) -> None:
    ddp = patched(Detached())
    held = []
    for _ in range(6):
        ddp(column(1))
        with torch.no_grad():
            ddp.module.inner.weight.mul_(0.5)
        held.append(ddp_mp.stats(ddp).low_bytes)
    assert held[2:] == held[1:2] * 4, held


# --- inside a forward --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Masters are asked for, and may be written, when half of the forward is computed; the backward needs both halves."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.write = scalar(2.0), scalar(4.0), scalar(1.0), write
        self.scale.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x))
        with torch.no_grad(), ddp_mp.full_precision(self):
            assert self.scale.weight.dtype is F32
            if self.write:
                self.scale.weight.data.mul_(2.0)
        return self.scale(x)


@on_ranks(2)
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("options", [{}, {"reuse_unchanged": True}, {"prefetch": True}])
def test_masters_asked_for_in_the_middle_of_a_forward_leave_its_graph_whole(
    rank: Rank, write: bool, options: dict[str, Any]
) -> None:
    def run(wrap: Wrap) -> Any:
        model = Block(write)
        ddp, found = wrap(model), []
        optimizer = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=2**-4)
        for _ in range(2):
            output = ddp(column(rank.index + 1))
            total(output).backward()
            found.append((output.item(), *gradients(model), model.scale.weight.item()))
            model.zero_grad()
        optimizer.step()
        return found

    precision = ddp_mp.MixedPrecision(BF16, F32)
    due = run(DistributedDataParallel)
    found = run(
        lambda m: ddp_mp.patch(DistributedDataParallel(m), mixed_precision=precision, options=ddp_mp.Options(**options))
    )
    assert found == due


class Recomputed(nn.Module):
    """A block that is computed again in backward, with a part in full precision."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = scalar(2.0), scalar(1 + 2**-10), reentrant

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).float()
        with ddp_mp.full_precision(self):
            return self.b(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_part_in_full_precision_is_so_when_a_checkpoint_computes_it_again(rank: Rank, reentrant: bool) -> None:
    model = Recomputed(reentrant)
    ddp = patched(model)
    for _ in range(2):
        output = ddp(column(1).requires_grad_())
        assert output.item() == 2 * (1 + 2**-10)
        output.sum().backward()
        assert gradients(model) == [1.0, 2.0]  # the first on its way through bfloat16
        assert {m.weight.dtype for m in (model.a, model.b)} == {F32}
        model.zero_grad()


class CallsItself(nn.Module):
    """The inner call asks for masters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = scalar(), []

    def forward(self, x: torch.Tensor, deep: bool = True) -> torch.Tensor:
        if deep:
            return self(self.inner(x), deep=False)
        with ddp_mp.full_precision(self):
            self.seen.append(self.inner.weight.dtype)
            self.seen.append(self(x.float(), deep=None).dtype) if deep is not None else None
        self.seen.append(self.inner.weight.dtype)
        return self.inner(x)


@on_ranks(1)
def test_masters_are_shown_in_a_forward_that_the_module_called_itself(rank: Rank) -> None:
    model = CallsItself()
    total(patched(model)(column(4))).backward()
    assert model.seen[:1] == [F32]
    assert model.seen[-1] is BF16
    assert gradients(model) == [4.0]


class Adversaries(nn.Module):
    """A training step inside the forward: the second loss goes through what was computed before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = chain(2.0, 1.0), scalar(0.5)

    def forward(self, x: torch.Tensor, steps: dict[str, torch.optim.Optimizer]) -> torch.Tensor:
        made = self.generator(x)
        total(self.critic(made.detach())).backward()
        steps["critic"].step()
        self.zero_grad()
        total(self.critic(made)).backward()
        self.found = gradients(self.generator)
        return self.critic(made).detach()


@on_ranks(1)
def test_optimizer_step_inside_a_forward_leaves_the_graph_of_the_others_whole(rank: Rank) -> None:
    def run(wrap: Wrap) -> Any:
        model = Adversaries()
        ddp = wrap(model)
        steps = {"critic": torch.optim.SGD(model.critic.parameters(), lr=2**-4)}
        output = (model if wrap is DistributedDataParallel else ddp)(column(1), steps)
        return output.item(), model.found, model.critic.weight.item()

    require_as_plain(run)


# --- shallow clones ----------------------------------------------------------------------------------------------------------


def clone(module: nn.Module) -> nn.Module:
    """As libraries for meta-learning make them, and ``nn.DataParallel`` its replicas."""
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {key: None if p is None else p * 2 for key, p in module._parameters.items()}
    made._modules = {key: None if m is None else clone(m) for key, m in module._modules.items()}
    return made


@on_ranks(1)
@pytest.mark.parametrize("options", [{}, {"full_precision_modules": ("0",)}, {"autocast": True}])
def test_shallow_clones_compute_with_their_own_weights_or_say_that_they_do_not(rank: Rank, options: dict[str, Any]) -> None:
    # learnables/learn2learn#170
    model = chain(2.0, 0.5)
    precision = ddp_mp.MixedPrecision(BF16, F32)
    ddp = ddp_mp.patch(DistributedDataParallel(model), mixed_precision=precision, options=ddp_mp.Options(**options))
    if options.get("autocast"):
        with pytest.raises(RuntimeError, match=r"shallow clone .* copy\.copy\(module\)"):
            clone(model)(column(1))
    else:
        output = clone(model)(column(1))
        output.sum().backward()
        assert (output.dtype, output.item(), gradients(model)) == (F32, 4.0, [2.0, 8.0])
        model.zero_grad()
    output = copy.copy(model)(column(1))
    output.sum().backward()
    assert (output.dtype, output.item(), gradients(model)) == (F32, 1.0, [0.5, 2.0])
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    assert ddp(column(1)).item() == 1.5
