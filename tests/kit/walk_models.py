"""Models that walks (``walk.py``) train: small, and each with something that once was a difficulty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.modules import Choice, Saved, Statistics, Two, mlp


class Tied(nn.Module):
    """One weight at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


class Functional(Two):
    """``b`` is never called, its parameters are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.a(x).tanh(), self.b.weight, self.b.bias)


class Repeated(nn.Module):
    """One layer three times, the second time in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        x = checkpoint(self.layer, x, use_reentrant=False)
        return self.layer(x.tanh())


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(8, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Unusual(nn.Module):
    """Parameters that are transposed, gapped, scalar, empty; one in a list, one on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(8, 8).t()), nn.Parameter(torch.randn(8, 16)[:, ::2])])
        self.scale, self.shift = nn.Parameter(torch.tensor(0.75)), nn.Parameter(torch.rand(8))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.many:
            x = (x @ weight / 4).tanh()
        return x * self.scale + self.shift + self.nothing.sum()


def attention() -> nn.Module:
    """A transformer layer over one sequence."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


@dataclass(frozen=True)
class Spec:
    """How a model is built, and what a walk must know of it."""

    build: Callable[[], nn.Module]
    unused: bool = False  # ranks and steps use other parameters
    tied: bool = False
    recomputes: bool = False  # has checkpoints


SPECS: dict[str, Spec] = {
    "mlp": Spec(lambda: mlp(8, 2)),
    "two": Spec(Two),
    "saved": Spec(Saved),
    "tied": Spec(Tied, tied=True),
    "functional": Spec(Functional),
    "repeated": Spec(Repeated, recomputes=True),
    "checkpointed": Spec(Checkpointed, recomputes=True),
    "choice": Spec(Choice, unused=True),
    "statistics": Spec(lambda: Statistics(0.25)),
    "unusual": Spec(Unusual),
    "attention": Spec(attention),
}
