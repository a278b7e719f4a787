"""Fine-tuning by low-rank adapters: the base is frozen, and only two thin matrices beside each of its layers train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way


class Adapted(nn.Module):
    """A frozen linear layer and a product of two thin ones beside it, which begins as zero."""

    def __init__(self, base: nn.Linear, rank: int = 4, scale: float = 2.0) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.narrow = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.wide = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.narrow), self.wide) * self.scale


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Adapted(nn.Linear(16, 64)), Adapted(nn.Linear(64, 64))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 4)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(F.gelu(self.first(x)))))


class Lora(Program):
    note = "Frozen weights are cast to leaves as others are; a checkpoint of the trainable part is a filtered `state_dict`."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Classifier())
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)

    def step(self, number: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        labels = 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        with self.way.computing():
            loss = F.cross_entropy(self.model(x).float(), labels)
        loss.backward()
        assert all((p.grad is not None) == p.requires_grad for p in self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
