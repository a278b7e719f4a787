"""Small modules and inputs that several test files use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def mlp(width: int = 8, depth: int = 2) -> nn.Sequential:
    """Linear layers with a smooth nonlinearity, so that every gradient depends on every weight."""
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])


def vectors(rows: int = 4, width: int = 8) -> Callable[[], torch.Tensor]:
    """Makes inputs of :func:`mlp`."""
    return lambda: torch.randn(rows, width)


class Two(nn.Module):
    """Two linear layers, ``a`` then ``b``; subclasses use them otherwise."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


class Saved(nn.Module):
    """Operations that save the parameter itself for backward; a linear layer saves a transposed view of it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.conv(x.unsqueeze(1))) * self.scale).tanh().sum(1)


class Statistics(nn.Module):
    """Running statistics as BatchNorm keeps them, in arithmetic that every type has; the newest have weight ``newest``."""

    def __init__(self, newest: float = 0.1) -> None:
        super().__init__()
        self.a, self.newest = nn.Linear(8, 8), newest
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        if self.training:
            self.mean.mul_(1 - self.newest).add_(y.detach().mean(0).to(self.mean.dtype), alpha=self.newest)
            self.batches += 1
        return y - self.mean.to(y.dtype)


class Choice(nn.Module):
    """Which branches run is in the first column of the input: bit k, of as many as there are branches, for branch k."""

    def __init__(self, branches: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(branches))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = int(x[0, 0])
        x = self.entry(x / 8)
        for k, branch in enumerate(self.branches):
            if chosen >> k & 1:
                x = branch(x).tanh()
        return x


class Luck(Exception):  # noqa: N818 - it is none of ours
    """What a user's hook raises."""


def no_luck(*_: Any) -> Any:
    """A hook that raises :class:`Luck`."""
    raise Luck


def scalar(value: float = 0.5) -> nn.Linear:
    """One weight, whose gradient is the input."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def column(value: float) -> torch.Tensor:
    """An input of :func:`scalar`."""
    return torch.full((1, 1), float(value))
