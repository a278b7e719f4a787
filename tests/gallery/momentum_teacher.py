"""Self-distillation: a student learns what its own average says of another view.  The teacher is outside of the wrapper."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .training import Program, Way, follow


class Backbone(nn.Module):
    """A head that normalises its weight, as DINO's last layer does, on a small network."""

    def __init__(self, classes: int = 12) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 32))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(32, classes, bias=False))

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        made = torch.zeros(0, 32)  # outputs of all views are joined to a tensor that the forward makes
        for view in views:
            made = torch.cat((made, self.body(view)))
        return self.last(F.normalize(made, dim=-1))


class Center(nn.Module):
    """The running mean of what the teacher says, which is part of the checkpoint."""

    def __init__(self, classes: int = 12) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(classes))

    def update(self, said: torch.Tensor) -> None:
        total = said.float().mean(0)
        dist.all_reduce(total)
        self.mean.lerp_(total / dist.get_world_size(), 0.1)


class MomentumTeacher(Program):
    note = (
        "The teacher averages `model.module.parameters()`, which are the full-precision masters. It is an ordinary module "
        "outside of the wrapper, and so computes in float32 unless you put autocast around it."
    )

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        student = Backbone()
        self.teacher = copy.deepcopy(student).requires_grad_(False)
        self.student = way.wrap(student)
        self.center = Center()
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-2)

    def step(self, number: int) -> torch.Tensor:
        samples = torch.randn(4, 16).repeat(4, 1)
        views = [samples + 0.1 * torch.randn_like(samples) for _ in range(2)]
        with self.way.computing():
            with torch.no_grad():
                said = self.teacher(views)
            target = ((said - self.center.mean) / 0.04).softmax(-1).chunk(2)
            guess = (self.student(views).float() / 0.1).log_softmax(-1).chunk(2)
            loss = -((target[0] * guess[1]).sum(-1).mean() + (target[1] * guess[0]).sum(-1).mean()) / 2
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        follow(self.teacher, self.student.module, decay=0.9)
        self.center.update(said)
        return loss
