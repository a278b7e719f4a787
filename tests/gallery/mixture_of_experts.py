"""A mixture of experts: a router sends each token to one of them, and in a step some get none on any rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way

EXPERTS, WIDTH = 8, 16


class Mixture(nn.Module):
    """Each token goes to the expert with the best score; the score scales what that expert says."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x).float().softmax(-1)
        best, chosen = scores.max(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            mine = (chosen == index).nonzero()[:, 0]
            out = out.index_add(0, mine, (self.experts[index](x[mine]) * best[mine, None]).to(out.dtype))
        return self.head(x + out), (scores.mean(0) ** 2).sum() * EXPERTS


class MixtureOfExperts(Program):
    note = "`find_unused_parameters=True` is given to the wrapper, as ever. An expert that no rank used has no gradient."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Mixture(), find_unused_parameters=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> torch.Tensor:
        labels = torch.randint(2, (16,)) + 2 * (number % 2)  # two of the four kinds, so that few experts are used
        x = F.one_hot(labels, WIDTH) * 3.0 + 0.1 * torch.randn(16, WIDTH)
        with self.way.computing():
            out, balance = self.model(x)
            loss = F.cross_entropy(out.float(), labels) + 0.01 * balance
        loss.backward()
        used = [any(p.grad is not None for p in expert.parameters()) for expert in self.model.module.experts]
        assert 0 < sum(used) < EXPERTS, used
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
