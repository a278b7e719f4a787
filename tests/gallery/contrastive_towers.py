"""Two towers, one for pictures and one for texts, whose outputs are gathered from all ranks for the contrastive loss."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .training import Program, Way

WORDS, LENGTH = 24, 6


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.text = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.picture = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(128, 16))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pictures: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen, told = self.picture(pictures), self.text(self.words(texts).mean(1))
        return F.normalize(seen, dim=-1), F.normalize(told, dim=-1), self.scale.exp()


def gathered(own: torch.Tensor) -> torch.Tensor:
    """The outputs of all ranks; gradients go to this rank's own only."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach().contiguous())
    parts[dist.get_rank()] = own
    return torch.cat(parts)


class ContrastiveTowers(Program):
    bound = 0.05
    note = (
        "Outputs are gathered over the ranks in the type in which they are computed. The loss is outside of the wrapper, so "
        "that it begins with `.float()`."
    )

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.model = way.wrap(Towers())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, number: int) -> torch.Tensor:
        texts = torch.randint(WORDS, (8, LENGTH))
        pictures = F.one_hot(texts.sum(1) % 64, 64).float().view(8, 1, 8, 8) * 8
        with self.way.computing():
            seen, told, scale = self.model(pictures, texts)
            all_seen, all_told = gathered(seen), gathered(told)
            own = torch.arange(8) + 8 * dist.get_rank()
            logits = (scale * seen @ all_told.T).float(), (scale * told @ all_seen.T).float()
            loss = F.cross_entropy(logits[0], own) + F.cross_entropy(logits[1], own)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.model.module.scale.clamp_(0, math.log(100))
        return loss
