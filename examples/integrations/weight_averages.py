"""Averages of the weights: EMA in every step, SWA over the last ones.

    torchrun --standalone --nproc-per-node=2 examples/integrations/weight_averages.py

Both are made of `ddp.module`, whose parameters are the full-precision masters where an optimizer step ends: changes far below
the resolution of bfloat16 are averaged, not lost.  The averaged model is an ordinary full-precision module.
Prints the loss of the model and of both averages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ddp_mp

STEPS, DECAY, SWA_FROM = 8, 0.9, 4


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
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))

    ema = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    swa = AveragedModel(ddp.module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = batch(step, rank).to(device)
        loss = loss_of(ddp, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(ddp.module)
        if step >= SWA_FROM:
            swa.update_parameters(ddp.module)
        with torch.no_grad():
            averages = loss_of(ema, x).item(), loss_of(swa, x).item()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  EMA {averages[0]:.4f}  SWA {averages[1]:.4f}")
    dist.destroy_process_group()
    parts = {"": ddp.module, "ema.": ema.module, "swa.": swa.module}
    return {f"{prefix}{name}": value for prefix, part in parts.items() for name, value in part.state_dict().items()}


if __name__ == "__main__":
    main()
