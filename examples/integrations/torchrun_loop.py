"""torchrun: the ordinary loop, on one host or on several.

    torchrun --standalone --nproc-per-node=2 examples/integrations/torchrun_loop.py

On two hosts, the same command on each, with the address of one of them:

    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-id=7 --rdzv-endpoint=HOST:29400 \
        examples/integrations/torchrun_loop.py

`ddp_mp.install()` stands before the model is built; `DistributedDataParallel` takes `mixed_precision=` as it always did.
Prints the loss, and whether all ranks end with the same full-precision parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

STEPS = 6


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.square().mean(1, keepdim=True))


def same_on_all_ranks(model: nn.Module) -> bool:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    highest, lowest = flat.clone(), flat.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return torch.equal(highest, lowest)


def main() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")

    ddp_mp.install()
    ddp = DistributedDataParallel(
        build_model().to(device), mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32)
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_of(ddp, batch(step, rank).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    same = same_on_all_ranks(ddp)
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, parameters in {next(ddp.parameters()).dtype}, the same on all: {same}")
    dist.destroy_process_group()
    return ddp.module.state_dict()


if __name__ == "__main__":
    main()
