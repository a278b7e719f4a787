"""Parameters that are frozen and thawed inside a forward, as by adversaries that take turns in one training step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from kit.modules import Two
from kit.oracle import patched
from kit.ranks import Rank, on_ranks

import ddp_mp


class Turns(Two):
    """Trains ``a`` and then ``b`` inside its forward, the other one frozen meanwhile."""

    def forward(self, x: torch.Tensor, rate: float = 0.1) -> torch.Tensor:
        for trained, other in ((self.a, self.b), (self.b, self.a)):
            other.requires_grad_(False)
            super().forward(x).square().mean().backward()
            assert all(p.grad is None for p in other.parameters()), "a frozen parameter has a gradient"
            torch.optim.SGD(trained.parameters(), lr=rate).step()
            trained.zero_grad()
            other.requires_grad_(True)
        return x


@on_ranks(1)
def test_side_frozen_while_the_other_one_steps_is_trained_afterwards(rank: Rank) -> None:
    module = Turns()
    before = [p.detach().clone() for p in module.parameters()]
    ddp = patched(module)
    for _ in range(2):
        with ddp.no_sync():
            ddp(torch.randn(4, 8))
        assert all(p.requires_grad for p in module.parameters())
    for (name, param), start in zip(module.named_parameters(), before, strict=True):
        assert not torch.equal(param, start), f"{name} was not trained"


class Thaws(Two):
    """Is thawed after a block in full precision, in the same forward."""

    full = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b.requires_grad_(False)
        with ddp_mp.full_precision(self) if self.full else contextlib.nullcontext():
            y = x + 1
        self.b.requires_grad_(True)
        return super().forward(y)


@pytest.mark.parametrize("full", [False, True])
@on_ranks(1)
def test_part_thawed_inside_the_forward_has_gradients(rank: Rank, full: bool) -> None:
    module = Thaws()
    ddp = patched(module)
    module.full = full
    ddp(torch.randn(4, 8)).float().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
