"""A GAN with a wrapper for each side: the discriminator is called twice before its backward, and inside the generator's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .training import Program, Way

NOISE = 8


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 16, 4), nn.GroupNorm(4, 16), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Tanh()
    )


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(0))


def real_ones(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 1, 1).clamp(-1, 1) * torch.ones(8).diag()


def judged(scores: torch.Tensor, real: bool) -> torch.Tensor:
    """With logits: autocast refuses ``binary_cross_entropy`` of probabilities."""
    return F.binary_cross_entropy_with_logits(scores.float(), torch.full_like(scores, float(real), dtype=torch.float32))


class Gan(Program):
    falls = False
    note = "Each wrapper is patched by itself. Write the loss with logits: autocast refuses `BCELoss`."

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.maker, self.judge = way.wrap(generator()), way.wrap(discriminator())
        self.maker_optimizer = torch.optim.Adam(self.maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.judge_optimizer = torch.optim.Adam(self.judge.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def step(self, number: int) -> torch.Tensor:
        real, noise = real_ones(8), torch.randn(8, NOISE, 1, 1)
        with self.way.computing():
            made = self.maker(noise)
            judge_loss = judged(self.judge(real), True) + judged(self.judge(made.detach()), False)
        self.judge_optimizer.zero_grad()
        judge_loss.backward()
        self.judge_optimizer.step()
        self.judge.requires_grad_(False)
        with self.way.computing():
            maker_loss = judged(self.judge(made), True)
        self.maker_optimizer.zero_grad()
        maker_loss.backward()
        self.maker_optimizer.step()
        self.judge.requires_grad_(True)
        return judge_loss + maker_loss
