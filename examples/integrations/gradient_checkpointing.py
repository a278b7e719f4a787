"""Gradient checkpointing: blocks are computed again in backward, from the same low-precision parameters.

    torchrun --standalone --nproc-per-node=2 examples/integrations/gradient_checkpointing.py

Nothing is to be done for it.  Models of transformers turn it on with `model.gradient_checkpointing_enable()`.
Prints the loss, and whether gradients are those of the same model without checkpoints, bit for bit.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddp_mp

STEPS = 4


class Blocks(nn.Module):
    """Residual blocks, in checkpoints or not."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return x


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Blocks(checkpoints=True)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def main() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    module = build_model().to(device)
    other = copy.deepcopy(module)
    other.checkpoints = False

    precision = ddp_mp.MixedPrecision(torch.bfloat16, torch.float32)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=precision)
    without = ddp_mp.patch(DistributedDataParallel(other), mixed_precision=precision)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, without)]
    same = True
    for step in range(STEPS):
        x = batch(step, rank).to(device)
        loss = loss_of(ddp, x)
        loss.backward()
        loss_of(without, x).backward()
        same &= all(torch.equal(p.grad, q.grad) for p, q in zip(ddp.parameters(), without.parameters(), strict=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradients as without checkpoints: {same}")
    dist.destroy_process_group()
    return module.state_dict()


if __name__ == "__main__":
    main()
