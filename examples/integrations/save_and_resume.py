"""torch.distributed.checkpoint: save in the middle, resume in a new model, go on with the same bits.

    torchrun --standalone --nproc-per-node=2 examples/integrations/save_and_resume.py

What is saved are the full-precision masters and the optimizer's state, whatever moment it is; what is loaded is written to the
masters.  A checkpoint of a patched model loads into an unpatched one, and the other way round.
Prints the loss, and whether the resumed run ends where the uninterrupted one does, bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

STEPS, SAVED_AFTER = 8, 4


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.square().mean(1, keepdim=True))


class Run:
    """A model and its optimizer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ddp = DistributedDataParallel(build_model().to(device))
        ddp_mp.patch(self.ddp, mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            loss = loss_of(self.ddp, batch(step, dist.get_rank()).to(self.device))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss.item():.4f}")

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.ddp, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def main() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(place)

    uninterrupted = Run(device)
    uninterrupted.train(0, SAVED_AFTER)
    uninterrupted.save(place[0])
    uninterrupted.train(SAVED_AFTER, STEPS)

    resumed = Run(device)
    resumed.load(place[0])
    resumed.train(SAVED_AFTER, STEPS)

    states = [run.ddp.module.state_dict() for run in (uninterrupted, resumed)]
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if dist.get_rank() == 0:
        print(f"the resumed run ends with the same bits: {same}")
        shutil.rmtree(place[0])
    dist.destroy_process_group()
    return {
        f"{prefix}{name}": value
        for prefix, state in zip(("", "resumed."), states, strict=True)
        for name, value in state.items()
    }


if __name__ == "__main__":
    main()
