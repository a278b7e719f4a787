"""What runs beside the casts: traces of two steps, and how much of the casts' time is hidden.

    python -m benchmarks.overlap --device cuda [--quick]

The model of ``benchmarks.train``.  For each way of waiting a trace is written, ``trace-<name>.json.gz``, which a browser shows
(chrome://tracing, ui.perfetto.dev).  Of every launch of our kernel on a stream where nothing else runs, the private one, the
time is counted that kernels of other streams run meanwhile:

casts         launches of ours on the private stream; ``packs`` those on other streams
cast us       how long the casts run, together; ``hidden us`` how long other kernels run in that time
waiting us    how long nothing else runs while a cast does

A CPU has no kernels to see: there the traces show the host's ranges, and the figures are 0.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Report, one_process_group, settings, synchronize
from benchmarks.train import REAL, TINY, Trained

STEPS = 2
KERNEL = "mp_cast"
NAMES = ("ddp_mp", "ddp_mp, wait module", "ddp_mp, prefetch")
Interval = tuple[float, float]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in intervals that do not touch."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def common(some: Iterable[Interval], others: Iterable[Interval]) -> float:
    """How long both last."""
    there = united(others)
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in united(some) for b, e in there)


def figures(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Of the kernels in a trace."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    others = [event for event in kernels if KERNEL not in event["name"]]
    busy = {event["args"]["stream"] for event in others}
    ours = [event for event in kernels if KERNEL in event["name"]]
    casts = [event for event in ours if event["args"]["stream"] not in busy]

    def spans(of: Iterable[dict[str, Any]]) -> list[Interval]:
        return [(event["ts"], event["ts"] + event["dur"]) for event in of]

    lasting = sum(end - begin for begin, end in united(spans(casts)))
    hidden = common(spans(casts), spans(others))
    return {
        "casts": len(casts),
        "packs": len(ours) - len(casts),
        "cast us": round(lasting, 1),
        "hidden us": round(hidden, 1),
        "waiting us": round(lasting - hidden, 1),
        "kernels": len(kernels),
    }


def traced(trained: Trained, file: Path) -> dict[str, float]:
    """Profiles some steps; the trace stays in the file."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if trained.device.type == "cuda" else [])]
    synchronize(trained.device)
    with profile(activities=activities) as seen:
        for _ in range(STEPS):
            trained.step()
            trained.optimizer.zero_grad()
        synchronize(trained.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = file.with_suffix("")
    seen.export_chrome_trace(str(plain))
    content = plain.read_bytes()
    plain.unlink()
    file.write_bytes(gzip.compress(content, 5))
    return figures(json.loads(content)["traceEvents"])


def main(arguments: Sequence[str] | None = None) -> int:
    s = settings(__doc__, arguments)
    size = TINY if s.quick else REAL
    tokens = torch.randint(size["vocabulary"], (size["batch"], size["length"]), device=s.device)
    report = Report("overlap", f"what runs beside the casts, {STEPS} steps", s.device, {"size": size})
    with one_process_group(s.device):
        for name in NAMES:
            trained = Trained(name, size, tokens)
            trained.warm_up()
            stem = name.replace(", ", "-").replace(" ", "-")
            report.add(variant=name, **traced(trained, s.output / f"trace-{stem}{f'-{s.tag}' if s.tag else ''}.json.gz"))
            report.write(s.output, s.tag)
            del trained
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
