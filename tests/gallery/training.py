"""What the programs of the gallery share: the three ways of training, and a program that can be trained, saved and resumed.

A program builds its models, wraps them with :meth:`Way.wrap`, and does one training step at a time as its public counterpart
would: its own forward, backward and optimizer.  Only ``with self.way.computing():`` around the forward and the loss tells the
ways apart, and it stands where a user of autocast would write ``with torch.autocast(...):``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

STEPS, HALF = 6, 3  # a checkpoint is made after HALF steps
PRECISION = ddp_mp.MixedPrecision(torch.bfloat16, torch.float32)


class Way:
    """Plain DistributedDataParallel in full precision; the base of the other ways."""

    name = "fp32"

    def wrap(self, module: nn.Module, **more: Any) -> DistributedDataParallel:
        """The module in its wrapper; ``more`` is for the wrapper's constructor."""
        return DistributedDataParallel(module, **more)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """What stands around forwards and losses."""
        return contextlib.nullcontext()


class Autocast(Way):
    """Plain DistributedDataParallel, forwards and losses inside ``torch.autocast``."""

    name = "autocast"

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class Patched(Way):
    """Wrappers patched by ddp_mp, with the options of the program and nothing else."""

    name = "ddp_mp"

    def __init__(self, options: ddp_mp.Options) -> None:
        self.options = options

    def wrap(self, module: nn.Module, **more: Any) -> DistributedDataParallel:
        return ddp_mp.patch(super().wrap(module, **more), mixed_precision=PRECISION, options=self.options)


class Program:
    """One program of the gallery.  A subclass builds everything in ``__init__(way)`` and does one step in :meth:`step`.

    Every attribute with a ``state_dict`` belongs to the checkpoint: wrappers, optimizers, teachers, averages.
    """

    options: ClassVar[ddp_mp.Options] = ddp_mp.Options(autocast=True)
    bound: ClassVar[float] = 0.02  #: how far the losses of the other ways may be from those of fp32, at every step
    falls: ClassVar[bool] = True  #: whether the loss falls; that of two adversaries need not
    note: ClassVar[str] = ""  #: what the page says about it

    def __init__(self, way: Way) -> None:
        self.way = way
        self.checkpoint = b""

    def step(self, number: int) -> torch.Tensor:
        """One training step; returns this rank's loss.  Random numbers are seeded by rank and step."""
        raise NotImplementedError

    def train(self, first: int = 0) -> list[float]:
        """Does the steps from ``first`` on, and returns their losses, averaged over the ranks."""
        losses = []
        for number in range(first, STEPS):
            seed(number)
            losses.append(averaged(self.step(number)))
            if number + 1 == HALF:
                self.checkpoint = written(self.state())
        return losses

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {name: value.state_dict() for name, value in vars(self).items() if hasattr(value, "state_dict")}

    def load(self, checkpoint: bytes) -> None:
        """Goes back to where the checkpoint was made."""
        for name, state in read(checkpoint).items():
            getattr(self, name).load_state_dict(state)

    def wrapped(self) -> dict[str, nn.Module]:
        """The models that are trained, as their states are called in :meth:`state`."""
        return {name: value for name, value in vars(self).items() if isinstance(value, DistributedDataParallel)}


def seed(number: int) -> None:
    """Random numbers of one step on this rank: the same in every way of training."""
    torch.manual_seed(1000 * (number + 1) + dist.get_rank())


def averaged(loss: torch.Tensor) -> float:
    """A loss in float32, averaged over the ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def written(state: dict[str, Any]) -> bytes:
    """A state as a file has it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def read(checkpoint: bytes) -> dict[str, Any]:
    """The state that :func:`written` has written."""
    return torch.load(io.BytesIO(checkpoint), weights_only=True)


def line(options: ddp_mp.Options) -> str:
    """The options as a user writes them: only what differs from the defaults."""
    fields = [(f.name, getattr(options, f.name), f.default) for f in dataclasses.fields(options)]
    return "Options(" + ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default) + ")"


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Moves every parameter of ``average`` towards that of ``model``."""
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 1 - decay)
