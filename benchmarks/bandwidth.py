"""Device time of what ddp_mp launches in a step, as bandwidth: casts of masters, and packing of gradients.

    python -m benchmarks.bandwidth [--device cuda] [--quick]

GB/s of bytes read and written, 1 GB = 1e9 bytes.  On a GPU the launches of one measurement wait behind a kernel that does
nothing until all of them are in the queue: host time is in no figure.  Every measurement goes through as many sets of tensors
as no cache holds.  ``copy`` moves float32 to float32 and is what can be had.  The work is

cast        float32 masters to bfloat16: ``copy_`` one by one, ``torch._foreach_copy_``, one multi-tensor launch on the current
            stream and on the private one, and what a forward does: the engine's casts, with their events, in buckets of
            1 and 25 MiB as they are by default, and in one bucket
pack        bfloat16 gradients to one float32 buffer, divided by 8: ``torch._foreach_copy_`` and ``_foreach_div_``, ours
accumulate  the same, added to what the masters have: ``_foreach_copy_``, ``_foreach_add_`` and ``_foreach_div_``, ours
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import Report, behind_a_wait, settings, synchronize
from ddp_mp import _C
from ddp_mp.tools import shapes
from ddp_mp.tools.measure import Spread, paired

MIB = 2**20
LOW, FULL = torch.bfloat16, torch.float32
DIVISOR = 8.0
#: Bytes that no cache holds, several times over.
UNCACHED = 512 * MIB
#: What of a set of tensors is done in one go.
Work = Callable[["Tensors"], object]


@dataclass
class Tensors:
    """Masters, their low-precision copies, low gradients, and one full-precision buffer with a view for each."""

    masters: list[torch.Tensor]
    lows: list[torch.Tensor]
    grads: list[torch.Tensor]
    views: list[torch.Tensor]

    @classmethod
    def of(cls, numels: Sequence[int], device: torch.device) -> Tensors:
        masters = [torch.empty(n, device=device).normal_() for n in numels]
        flat = torch.zeros(sum(numels), device=device)
        grads = [torch.empty(n, dtype=LOW, device=device).normal_() for n in numels]
        return cls(masters, [torch.zeros_like(m, dtype=LOW) for m in masters], grads, list(flat.split(list(numels))))

    @property
    def nothing(self) -> list[torch.Tensor | None]:
        return [None] * len(self.masters)


class EngineCast:
    """The casts of a forward: an engine for each set of tensors, with its events."""

    def __init__(self, sets: Sequence[Tensors], first: int, later: int) -> None:
        self.engines = {id(tensors): self._engine(tensors, first, later) for tensors in sets}

    @staticmethod
    def _engine(tensors: Tensors, first: int, later: int) -> tuple[_C.Engine, list[torch.Tensor]]:
        masters = tensors.masters
        engine = _C.Engine(masters, [str(i) for i in range(len(masters))], [], "bfloat16", first, later)
        arenas = [torch.zeros(nbytes, dtype=torch.uint8, device=masters[0].device) for _, _, nbytes in engine.buckets]
        lows = [
            arenas[bucket][offset : offset + LOW.itemsize * master.numel()].view(LOW)
            for master, (bucket, offset) in zip(masters, engine.rows, strict=True)
        ]
        engine.bind([master.data for master in masters], lows, arenas)
        return engine, lows

    def __call__(self, tensors: Tensors) -> None:
        engine, _ = self.engines[id(tensors)]
        engine.cast()
        engine.wait()


def copy_one_by_one(tensors: Tensors) -> None:
    for low, master in zip(tensors.lows, tensors.masters, strict=True):
        low.copy_(master)


def foreach_pack(tensors: Tensors) -> None:
    torch._foreach_copy_(tensors.views, tensors.grads)
    torch._foreach_div_(tensors.views, DIVISOR)


def foreach_accumulate(tensors: Tensors) -> None:
    torch._foreach_copy_(tensors.views, tensors.grads)
    torch._foreach_add_(tensors.views, tensors.masters)
    torch._foreach_div_(tensors.views, DIVISOR)


def works(sets: Sequence[Tensors]) -> dict[tuple[str, str], tuple[Work, int]]:
    """By what it does and how: the work, and bytes an element."""
    return {
        ("copy", "_foreach_copy_"): (lambda t: torch._foreach_copy_(t.views, t.masters), 8),
        ("cast", "copy_"): (copy_one_by_one, 6),
        ("cast", "_foreach_copy_"): (lambda t: torch._foreach_copy_(t.lows, t.masters), 6),
        ("cast", "ours, current stream"): (lambda t: _C.fuse(t.masters, t.nothing, t.lows, 1.0), 6),
        ("cast", "ours, private stream"): (lambda t: _C.fuse(t.masters, t.nothing, t.lows, 1.0, True), 6),
        ("cast", "engine, 25 MiB"): (EngineCast(sets, MIB, 25 * MIB), 6),
        ("cast", "engine, one bucket"): (EngineCast(sets, 2**40, 2**40), 6),
        ("pack", "_foreach_"): (foreach_pack, 6),
        ("pack", "ours"): (lambda t: _C.fuse(t.grads, t.nothing, t.views, DIVISOR), 6),
        ("accumulate", "_foreach_"): (foreach_accumulate, 10),
        ("accumulate", "ours"): (lambda t: _C.fuse(t.grads, list(t.masters), t.views, DIVISOR), 10),
    }


def measured(work: Work, sets: Sequence[Tensors], moved: int) -> Callable[[], dict[str, float]]:
    device = sets[0].masters[0].device

    def once() -> dict[str, float]:
        return {"GB/s": moved / behind_a_wait([lambda tensors=tensors: work(tensors) for tensors in sets], device)}

    return once


def require_same(name: str, got: Sequence[torch.Tensor], due: Sequence[torch.Tensor]) -> None:
    if not all(map(torch.equal, got, due)):
        raise AssertionError(f"{name}: the result differs from that of PyTorch's own operations")


def check(name: str, todo: dict[tuple[str, str], tuple[Work, int]], sets: Sequence[Tensors]) -> None:
    """What is ours gives what PyTorch's own operations give."""
    for tensors in sets:
        rounded = [master.to(LOW) for master in tensors.masters]
        for (kind, how), (work, _) in todo.items():
            if how.startswith("ours") or isinstance(work, EngineCast):
                work(tensors)
                synchronize(tensors.masters[0].device)
            if isinstance(work, EngineCast):
                require_same(f"{name}, {how}", work.engines[id(tensors)][1], rounded)
            elif how.startswith("ours") and kind == "cast":
                require_same(f"{name}, {how}", tensors.lows, rounded)
            elif how.startswith("ours"):
                added = tensors.masters if kind == "accumulate" else [torch.zeros_like(m) for m in tensors.masters]
                due = [(grad.to(FULL) + more) / DIVISOR for grad, more in zip(tensors.grads, added, strict=True)]
                require_same(f"{name}, {kind}", tensors.views, due)


def measure(report: Report, name: str, numels: Sequence[int], uncached: int, rounds: int, ours: bool) -> None:
    elements = sum(numels)
    sets = [Tensors.of(numels, report.device) for _ in range(max(1, uncached // (elements * 6)))]
    todo = works(sets)
    check(name, todo, sets)
    if ours:
        todo = {(kind, how): work for (kind, how), work in todo.items() if kind == "copy" or how.startswith(("ours", "engine"))}
    values = paired({key: measured(work, sets, elements * size) for key, (work, size) in todo.items()}, rounds, repeat=1)
    copied = values["copy", "_foreach_copy_"]["GB/s"]
    for (kind, how), figures in values.items():
        cells = {
            "GB/s": Spread.of(figures["GB/s"]),
            "of a copy": Spread.of(a / b for a, b in zip(figures["GB/s"], copied, strict=True)),
        }
        report.add(tensors=name, MiB=round(elements * 4 / MIB, 2), count=len(numels), work=kind, how=how, **cells)


def lists(quick: bool) -> dict[str, list[int]]:
    """Element counts of what is measured, the most important first."""
    if quick:
        return {"one tensor": [4099], "gpt2": [p.numel() for p in shapes.build("gpt2").parameters()]}
    with torch.device("meta"):
        real = {name: [p.numel() for p in shapes.build(name, real_size=True).parameters()] for name in ("gpt2", "resnet50")}
    single = {f"one of {size} MiB": [size * MIB // 4] for size in (25, 512)}
    return {"gpt2": real["gpt2"], **single, "resnet50": real["resnet50"]}


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ours", action="store_true", help="nothing of PyTorch's but the copy")

    s = settings(__doc__, arguments, extend)
    report = Report("bandwidth", "bandwidth of casts and packing, GB/s", s.device, {})
    with torch.no_grad():
        for name, numels in lists(s.quick).items():
            measure(report, name, numels, 0 if s.quick else UNCACHED, 3 if s.quick else 15, s.extra.ours)
            report.write(s.output, s.tag)
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
