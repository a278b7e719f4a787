"""Whole training steps in float32 and in three kinds of mixed precision, side by side: ``python -m ddp_mp bench --step``."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

from .measure import Spread, now, number, paired
from .show import show_table

LOW = torch.bfloat16
#: The kinds that are compared, with what each is.
KINDS = {
    "fp32": "plain DistributedDataParallel",
    "autocast": "plain DistributedDataParallel inside torch.autocast",
    "ddp_mp": "ddp_mp.patch(ddp)",
    "ddp_mp, autocast": "ddp_mp.patch(ddp, options=ddp_mp.Options(autocast=True))",
}


class Trainee:
    """The model in one kind of precision, and its training step.

    Args:
        kind: one of ``KINDS``.
        module: what is trained.
        loss: the loss of the wrapped model.
        device: where the module is.
    """

    def __init__(self, kind: str, module: nn.Module, loss: Callable[[nn.Module], torch.Tensor], device: str) -> None:
        self.ddp, self.loss, self.device = DistributedDataParallel(module), loss, device
        if kind.startswith("ddp_mp"):
            policy = ddp_mp.MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
            options = ddp_mp.Options(autocast=kind.endswith("autocast"))
            ddp_mp.patch(self.ddp, mixed_precision=policy, options=options)
        self._autocast = kind == "autocast"
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)

    def step(self) -> dict[str, float]:
        """One training step; nanoseconds."""
        self._synchronize()
        begin = now()
        with torch.autocast(self.device, LOW) if self._autocast else contextlib.nullcontext():
            loss = self.loss(self.ddp)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._synchronize()
        return {"step": now() - begin}

    def peak(self) -> int:
        """Bytes of tensors at the highest point of a step: what is kept between steps, and what a step adds to it."""
        if self.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return self._kept() + torch.cuda.max_memory_allocated() - before
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with silent_stderr(), torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            self.step()
        results: Any = profile.profiler
        events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
        held = highest = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            highest = max(highest, held)
        return self._kept() + highest

    def _kept(self) -> int:
        """Bytes of parameters, buffers and the optimizer's state."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        kept = [*self.ddp.parameters(), *self.ddp.buffers(), *(v for v in states if isinstance(v, torch.Tensor))]
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Nothing is printed to the standard error inside: PyTorch's profiler says there that it begins and ends."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def trainees(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor], device: str
) -> tuple[dict[str, Trainee], dict[str, str]]:
    """The model in every kind of precision, each of which has made a step; and why a kind is left out, if one is."""
    found, left = {}, {}
    for kind in KINDS:
        try:
            trainee = Trainee(kind, make().to(device), loss, device)
            trainee.step()
            found[kind] = trainee
        except Exception as error:
            said = (str(error).strip().splitlines() or [""])[0]
            left[kind] = f"{type(error).__name__}: {said}"
    return found, left


def compare(
    name: str,
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    device: str,
    rounds: int,
    progress: Callable[[range], Iterable[int]],
) -> int:
    """Times the kinds in alternation, shows a table and says which is the fastest; returns the exit status."""
    running, left = trainees(make, loss, device)
    for kind, why in left.items():
        print(f"{kind} cannot train this model and is left out: {why}")
    if not running:
        return 1
    peaks = {kind: trainee.peak() for kind, trainee in running.items()}
    measured = paired({kind: trainee.step for kind, trainee in running.items()}, rounds, repeat=1, progress=progress)
    times = {kind: values["step"] for kind, values in measured.items()}
    rows = []
    for kind, values in times.items():
        share = str(ratio(values, times["fp32"])) if "fp32" in times else "-"
        rows.append((kind, str(Spread.of(values, 1e-6)), share, number(peaks[kind] / 2**20)))
    title = f"{name}: one training step, AdamW, one process, {device}, {torch.get_num_threads()} threads; median (p10-p90)"
    show_table(title, ("", "ms", "times fp32", "peak, MiB"), rows)
    for kind in running:
        print(f"{kind}: {KINDS[kind]}")
    print(verdict(times, device))
    return 0


def ratio(values: list[float], of: list[float]) -> Spread:
    """Of two kinds, round by round."""
    return Spread.of(a / b for a, b in zip(values, of, strict=True))


def verdict(times: Mapping[str, list[float]], device: str) -> str:
    """Which kind is the fastest, in a sentence or two."""
    medians = {kind: Spread.of(values).median for kind, values in times.items()}
    best, *others = sorted(medians, key=lambda kind: medians[kind])
    said = f"The fastest here is {best}."
    if others:
        second = ratio(times[others[0]], times[best])
        clear = second.p10 > 1 or math.isclose(second.p10, second.p90)
        said = f"The fastest here is {best}; {others[0]} takes {second} times as long."
        said += "" if clear else " The difference is within what the rounds differ by."
    if best == "fp32":
        said += f" Mixed precision makes no step of this model faster on this {device}: train it in float32."
    return said
