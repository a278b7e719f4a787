"""Diffusion: a UNet with an embedding of the time step predicts noise; an average of its weights draws samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .training import Program, Way

TIMES, WIDTH = 1000, 16


def embedded(times: torch.Tensor) -> torch.Tensor:
    """Sine waves of the time step, in float32 whatever the model computes in."""
    waves = times.float()[:, None] * torch.exp(-torch.linspace(0, 9, WIDTH))
    return torch.cat((waves.sin(), waves.cos()), -1)


class Block(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, given), nn.GroupNorm(4, made)
        self.conv1, self.conv2 = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.time, self.skip = nn.Linear(4 * WIDTH, made), nn.Conv2d(given, made, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(2 * WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, 4 * WIDTH))
        self.enter, self.leave = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.down, self.middle, self.up = Block(WIDTH, WIDTH), Block(WIDTH, WIDTH), Block(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(embedded(times))
        high = self.down(self.enter(x), time)
        low = F.interpolate(self.middle(F.avg_pool2d(high, 2), time), scale_factor=2)
        return self.leave(self.up(torch.cat((high, low), 1), time))


class Diffusion(Program):
    note = (
        "Inputs are left alone under `autocast`, so that time step 998 stays 998. Samples are drawn from the average and from "
        "the bare module, without the wrapper."
    )

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        net = UNet()
        self.average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.model = way.wrap(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def step(self, number: int) -> torch.Tensor:
        clean = torch.ones(8, 1, 8, 8) * torch.linspace(-1, 1, 8)
        noise, times = torch.randn_like(clean), torch.randint(TIMES, (8,))
        kept = (1 - times / TIMES)[:, None, None, None]
        noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
        with self.way.computing():
            loss = F.mse_loss(self.model(noisy, times).float(), noise)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model.module)
        with torch.no_grad(), self.way.computing():
            for net in (self.average, self.model.module):
                assert net(noise[:1], torch.tensor([TIMES - 1])).isfinite().all()
        return loss
