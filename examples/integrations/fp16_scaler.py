"""float16 with a GradScaler: steps whose gradients overflow are skipped, and the scale adapts.

    torchrun --standalone --nproc-per-node=2 examples/integrations/fp16_scaler.py

Gradients are full precision where the scaler sees them, so `unscale_` and clipping work on plain fp32 tensors.  The average is
taken before the sum: ranks do not overflow together where each alone would not.  A gradient that overflows on one rank is
infinite on all of them, so that all ranks skip the same steps.
Prints the loss and the scale, and whether the step was taken; the first scale is far too large on purpose.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

STEPS, SCALE = 8, 2.0**20


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.square().mean(1, keepdim=True))


def main() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    ddp = DistributedDataParallel(build_model().to(device))
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.float16, torch.float32))

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE)
    for step in range(STEPS):
        loss = loss_of(ddp, batch(step, rank).to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  scale {before:9.0f}  taken: {scaler.get_scale() >= before}")
    dist.destroy_process_group()
    return ddp.module.state_dict()


if __name__ == "__main__":
    main()
