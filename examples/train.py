"""The smallest use of ddp_mp: ordinary DDP training code, and one line more.

torchrun --standalone --nproc-per-node=2 examples/train.py [FILE TO SAVE THE MODEL IN]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp


def main() -> None:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(device)

    ddp = DistributedDataParallel(model)
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))  # the line

    torch.manual_seed(dist.get_rank())  # other data on every rank
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(50):
        x = torch.randn(128, 64, device=device)
        loss = nn.functional.mse_loss(ddp(x).float(), x.square().mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")
    if len(sys.argv) > 1 and dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), sys.argv[1])  # in full precision
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
