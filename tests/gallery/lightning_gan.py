"""A GAN by manual optimisation in PyTorch Lightning: one wrapper around both sides, and backwards inside its forward.

Lightning wraps the module itself, so ``ddp_mp.install`` is what patches the wrapper, and checkpoints are Lightning's.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch as replaced

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import ddp_mp

from .gan import NOISE, discriminator, generator, judged, real_ones
from .training import HALF, PRECISION, STEPS, Autocast, Patched, Program, Way, averaged, seed


class Adversaries(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = generator(), discriminator()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        seed(self.current_epoch)
        for_maker, for_judge = self.optimizers()
        real, noise = real_ones(8), torch.randn(8, NOISE, 1, 1)

        self.toggle_optimizer(for_judge)
        judge_loss = judged(self.judge(real), True) + judged(self.judge(self.maker(noise).detach()), False)
        for_judge.zero_grad()
        self.manual_backward(judge_loss)
        for_judge.step()
        self.untoggle_optimizer(for_judge)

        self.toggle_optimizer(for_maker)
        maker_loss = judged(self.judge(self.maker(noise)), True)
        for_maker.zero_grad()
        self.manual_backward(maker_loss)
        for_maker.step()
        self.untoggle_optimizer(for_maker)
        self.losses.append(averaged(judge_loss + maker_loss))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(side.parameters(), lr=2e-3, betas=(0.5, 0.999)) for side in (self.maker, self.judge)]


class SaveAtHalf(lightning.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.current_epoch + 1 == HALF:
            trainer.save_checkpoint(self.path)


class LightningGan(Program):
    """An epoch is one step here."""

    falls = False
    note = (
        "`ddp_mp.install` patches what Lightning wraps; leave the Trainer's `precision` at 32. Backwards and optimizer steps "
        "run inside the wrapper's forward."
    )

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.module = Adversaries()
        self.optimizers: list[dict[str, Any]] = []

    def train(self, first: int = 0) -> list[float]:
        with tempfile.TemporaryDirectory() as folder, told_by_environment(), self._patching():
            half, begin = Path(folder) / "half.ckpt", Path(folder) / "begin.ckpt"
            begin.write_bytes(self.checkpoint)
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy=DDPStrategy(find_unused_parameters=True),
                plugins=[TorchElasticEnvironment()],
                precision="bf16-mixed" if isinstance(self.way, Autocast) else "32-true",
                max_epochs=STEPS,
                callbacks=[SaveAtHalf(half)],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(self.module, DataLoader(torch.zeros(dist.get_world_size(), 1)), ckpt_path=begin if first else None)
            self.optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
            if not first:
                self.checkpoint = from_first_rank(half)
        return self.module.losses

    def _patching(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.way, Patched):
            return ddp_mp.install(self.way.options, mixed_precision=PRECISION)
        return contextlib.nullcontext()

    def state(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizers": self.optimizers}

    def load(self, checkpoint: bytes) -> None:
        self.checkpoint = checkpoint  # given to the Trainer

    def wrapped(self) -> dict[str, nn.Module]:
        return {"module": self.module}


def from_first_rank(path: Path) -> bytes:
    """The file, which Lightning writes on the first rank only."""
    content = [path.read_bytes() if dist.get_rank() == 0 else b""]
    dist.broadcast_object_list(content)
    return content[0]


@contextlib.contextmanager
def told_by_environment() -> Iterator[None]:
    """The process group is there already; Lightning reads from the environment which rank this is, and warns of small data."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with replaced.dict(os.environ, {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
