"""PyTorch Lightning: a LightningModule under DDPStrategy.

    torchrun --standalone --nproc-per-node=2 examples/integrations/lightning_fit.py

or with plain python, where Lightning starts the second process itself.  `DDPStrategy` hands what it does not know on to
`DistributedDataParallel`, so `mixed_precision=` is given there, after `ddp_mp.install()`.  Leave the Trainer's own `precision`
at 32: that one is autocast.  The wrapper casts every floating tensor of a batch, targets too.  Manual
optimization (`automatic_optimization=False`) works as well.
Prints the loss, and what type the parameters have where callbacks see them.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
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


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return loss_of(self.model, batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.global_rank == 0:
            print(f"step {index}  loss {outputs['loss'].item():.4f}  parameters in {self.model[0].weight.dtype}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> dict[str, torch.Tensor]:
    cuda = torch.cuda.is_available()
    ddp_mp.install()
    trainer = lightning.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=2,
        strategy=DDPStrategy(mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32)),
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, DataLoader(TensorDataset(samples()), batch_size=BATCH))
    return module.model.state_dict()


if __name__ == "__main__":
    main()
