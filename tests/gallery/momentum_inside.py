"""Contrast with a momentum encoder that lives inside the wrapped model and is moved by its forward, as in MoCo-v3."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import ddp_mp

from .training import Program, Way


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16))
        self.predict = nn.Linear(16, 16)
        self.momentum = copy.deepcopy(self.base).requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        for slow, fast in zip(self.momentum.parameters(), self.base.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        queries = F.normalize(self.predict(self.base(one)), dim=-1)
        with torch.no_grad():
            self.move()
            keys = F.normalize(self.momentum(other), dim=-1)
        logits = queries @ keys.T / 0.2
        return F.cross_entropy(logits, torch.arange(len(logits)))


class MomentumInside(Program):
    options = ddp_mp.Options(autocast=True, full_precision_modules=("momentum",))
    note = (
        "The forward moves the momentum encoder by `parameters()`, which are masters, and then calls it. In full precision it "
        "computes with what was just written; without that, with leaves that were cast before, one step late."
    )

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Contrast())
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=3e-3)

    def step(self, number: int) -> torch.Tensor:
        samples = torch.randn(8, 16)
        with self.way.computing():
            loss = self.model(samples + 0.1 * torch.randn(8, 16), samples + 0.1 * torch.randn(8, 16))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
