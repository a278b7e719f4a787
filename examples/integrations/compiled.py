"""torch.compile: the wrapper is compiled after it was patched.

    torchrun --standalone --nproc-per-node=2 examples/integrations/compiled.py [BACKEND]

The order does not matter to ddp_mp: a module that is compiled before it is wrapped works too, and so does `ddp.compile()`.
The hooks around the forward stay outside of what is compiled, the model between them is compiled as usual.
Prints the loss, and how far the parameters end from those of a loop that does not compile: a compiler may round elsewhere, so
only the backends "eager" and "aot_eager" give the same bits.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

STEPS = 6


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.square().mean(1, keepdim=True))


def train(module: nn.Module, backend: str | None, device: torch.device) -> dict[str, torch.Tensor]:
    precision = ddp_mp.MixedPrecision(torch.bfloat16, torch.float32)
    ddp = ddp_mp.patch(DistributedDataParallel(module), mixed_precision=precision)
    model = ddp if backend is None else torch.compile(ddp, backend=backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_of(model, batch(step, dist.get_rank()).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"{backend or 'not compiled'}: step {step}  loss {loss.item():.4f}")
    return module.state_dict()


def main() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    module = build_model().to(device)
    plain = train(copy.deepcopy(module), None, device)
    state = train(module, sys.argv[1] if len(sys.argv) > 1 else "inductor", device)
    apart = max((state[name] - plain[name]).abs().max().item() for name in state)
    if dist.get_rank() == 0:
        print(f"largest difference to the loop that does not compile: {apart:.2g}")
    dist.destroy_process_group()
    return state


if __name__ == "__main__":
    main()
