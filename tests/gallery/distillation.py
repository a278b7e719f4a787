"""Distillation: a small student learns from labels and from a frozen teacher, which is not wrapped."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way


def classifier(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 5))


class Distillation(Program):
    note = "The frozen teacher is a module of its own: wrap and patch only what trains."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.teacher = classifier(64).requires_grad_(False).eval()
        self.student = way.wrap(classifier(24))
        self.optimizer = torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9)

    def step(self, number: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        with self.way.computing():
            with torch.no_grad():
                said = self.teacher(x).float() * 4
            guess = self.student(x).float()
            soft = F.kl_div((guess / 2).log_softmax(-1), (said / 2).log_softmax(-1), reduction="batchmean", log_target=True)
            loss = 4 * soft + F.cross_entropy(guess, said.argmax(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
