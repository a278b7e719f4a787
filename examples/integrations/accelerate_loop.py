"""Hugging Face Accelerate: its loop, with gradient accumulation and clipping.

    torchrun --standalone --nproc-per-node=2 examples/integrations/accelerate_loop.py

or, on GPUs, with `accelerate launch --num_processes=2`, which starts one process only on a CPU.
`Accelerator.prepare` builds the wrapper and does not pass `mixed_precision=` on, so `ddp_mp.install` is told the precisions.
Leave Accelerate's own `mixed_precision` at "no": that one is autocast, which would be a second one.
Where the script only wants one model patched: `ddp_mp.patch(accelerator.prepare(model), mixed_precision=...)`.
Prints the loss, and what type the parameters have where a user sees them.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_mp

ACCUMULATE, BATCH, SAMPLES = 2, 4, 64


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x).float(), x.square().mean(1, keepdim=True))


def main() -> dict[str, torch.Tensor]:
    ddp_mp.install(mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(samples()), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, x)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss.item():.4f}")
    state = accelerator.get_state_dict(model)
    accelerator.print(f"patched: {ddp_mp.is_patched(model)}, saved in {next(iter(state.values())).dtype}")
    accelerator.end_training()
    return state


if __name__ == "__main__":
    main()
