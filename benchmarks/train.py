"""A step of GPT-2 in time and in memory: ddp_mp and everything else that gives low-precision compute, at a size that counts.

    python -m benchmarks.train --device cuda [--quick]

GPT-2 small, with an output layer of its own: PyTorch's hooks cannot train a tied one.  8 sequences of 1,024 tokens, AdamW, one
rank.  All variants are built first, one after the other, and then alternate.  For each

peak GiB      what PyTorch's allocator had given out at most in a step, beyond what it had before the model was built
launches      casts that a step enqueues; ``waits`` those that a stream waits for
moved         gradients that lie elsewhere than in the step before
step ms       from the beginning of a step on the device to the beginning of the next, without a wait in between
host ms       what the host takes to enqueue it; where that is about as long as the step, the device waits for the host

The variants are those of ``benchmarks.step`` without ``alone`` and ``floor``, FSDP's ``fully_shard`` of one rank, and ddp_mp
with ``wait="module"`` and with ``prefetch``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddp_mp
from benchmarks.harness import Report, one_process_group, settings, synchronize
from benchmarks.step import LOW, replicated
from ddp_mp.tools.gpt import GPT
from ddp_mp.tools.measure import Spread, now, paired
from ddp_mp.tools.upstream import silent_device_events

GIB = 2**30
REAL = {"width": 768, "layers": 12, "heads": 12, "vocabulary": 50257, "batch": 8, "length": 1024, "rounds": 20}
TINY = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 256, "batch": 2, "length": 16, "rounds": 3}
Make = Callable[[nn.Module], nn.Module]


def policy() -> _MixedPrecision:
    return _MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)


def patched(**options: Any) -> Make:
    chosen = ddp_mp.Options(**options)
    return lambda module: ddp_mp.patch(DistributedDataParallel(module), mixed_precision=policy(), options=chosen)


def native(module: nn.Module) -> nn.Module:
    with silent_device_events():
        return DistributedDataParallel(module, mixed_precision=policy())


def sharded(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (1,))
    precision = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    for block in module.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(module, mesh=mesh, mp_policy=precision)


#: The most important first: what comes later is lost when time is over.
VARIANTS: dict[str, Make] = {
    "bf16": lambda module: DistributedDataParallel(module.to(LOW)),
    "ddp_mp": patched(),
    "ddp_mp, wait module": patched(wait="module"),
    "ddp_mp, prefetch": patched(prefetch=True),
    "pytorch": native,
    "autocast": DistributedDataParallel,
    "replicate": lambda module: replicated(module, next(module.parameters()).device),
    "fully_shard": sharded,
    "fp32": DistributedDataParallel,
}


class Trained:
    """A variant in training."""

    def __init__(self, name: str, size: dict[str, int], tokens: torch.Tensor) -> None:
        self.name, self.tokens, self.device = name, tokens, tokens.device
        torch.manual_seed(0)
        with self.device:
            module = GPT(size["width"], size["layers"], size["heads"], False, size["vocabulary"], size["length"])
        self.model = VARIANTS[name](module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def around(self) -> contextlib.AbstractContextManager[Any]:
        if self.name == "autocast":
            return torch.autocast(self.device.type, LOW)
        return silent_device_events() if self.name == "pytorch" else contextlib.nullcontext()

    def step(self, optimize: bool = True) -> None:
        with self.around():
            logits = self.model(self.tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens.flatten())
            loss.backward()
        if optimize:
            self.optimizer.step()

    def places(self) -> list[int]:
        """Where each gradient lies; those that are not plain tensors are left out."""
        return [p.grad.data_ptr() for p in self.model.parameters() if type(p.grad) is torch.Tensor]

    def warm_up(self) -> dict[str, Any]:
        """The first steps, and what is counted in them."""
        self.step(optimize=False)  # PyTorch's first gradients are uninitialised memory
        self.optimizer.zero_grad()
        self.step()
        before = self.places()
        self.optimizer.zero_grad()
        counted = ddp_mp.stats(self.model) if ddp_mp.is_patched(self.model) else None
        self.step()
        moved = sum(a != b for a, b in zip(before, self.places(), strict=True)) if before else None
        self.optimizer.zero_grad()
        if counted is None:
            return {"moved": moved}
        after = ddp_mp.stats(self.model)
        return {"launches": after.launches - counted.launches, "waits": after.waits - counted.waits, "moved": moved}

    def timed(self) -> dict[str, float]:
        """Two steps in a row, of which the second begins on a device that is still at work; that one's times."""
        cuda = self.device.type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else []
        self._step_and_clear()
        start = now()
        for event in events[:1]:
            event.record()
        self._step_and_clear()
        for event in events[1:]:
            event.record()
        host = now() - start
        synchronize(self.device)
        return {"step": events[0].elapsed_time(events[1]) * 1e6 if cuda else host, "host": host}

    def _step_and_clear(self) -> None:
        self.step()
        self.optimizer.zero_grad()


def built(name: str, size: dict[str, int], tokens: torch.Tensor) -> tuple[Trained, dict[str, Any]]:
    """A variant that has made its first steps, and what was seen meanwhile."""
    if tokens.device.type != "cuda":
        trained = Trained(name, size, tokens)
        return trained, trained.warm_up()
    gc.collect()
    torch.cuda.synchronize(tokens.device)
    held = torch.cuda.memory_allocated(tokens.device)
    trained = Trained(name, size, tokens)
    counted = trained.warm_up()
    torch.cuda.reset_peak_memory_stats(tokens.device)
    trained._step_and_clear()
    torch.cuda.synchronize(tokens.device)
    peak = torch.cuda.max_memory_allocated(tokens.device) - held
    after = torch.cuda.memory_allocated(tokens.device) - held
    return trained, {"peak GiB": round(peak / GIB, 3), "held GiB": round(after / GIB, 3), **counted}


def measure(report: Report, size: dict[str, int], write: Callable[[], object]) -> None:
    tokens = torch.randint(size["vocabulary"], (size["batch"], size["length"]), device=report.device)
    variants: dict[str, Trained] = {}
    for name in VARIANTS:
        try:
            variants[name], counted = built(name, size, tokens)
        except Exception as error:  # a peer that this PyTorch or this device does not have
            report.notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        report.add(variant=name, **counted)
        write()
    values = paired({name: variant.timed for name, variant in variants.items()}, size["rounds"], repeat=1)
    for row in report.rows:
        measured = values[row["variant"]]
        row["step ms"], row["host ms"] = Spread.of(measured["step"], 1e-6), Spread.of(measured["host"], 1e-6)
        if plain := values.get("bf16"):
            row["x bf16"] = Spread.of(a / b for a, b in zip(measured["step"], plain["step"], strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, default=0)

    s = settings(__doc__, arguments, extend)
    size = dict(TINY if s.quick else REAL)
    size["rounds"] = s.extra.rounds or size["rounds"]
    report = Report("train", "a training step of GPT-2", s.device, {"size": size})
    with one_process_group(s.device):
        measure(report, size, lambda: report.write(s.output, s.tag))
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
