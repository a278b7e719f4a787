"""How everything here is measured: paired, in one process, inside real training steps.

Host times of microseconds depend on what the caches hold, on the clock of the core and on who else uses the machine.
Three rules follow, and this file exists to make them the easy way:

* *Paired.*  Variants that are compared run in one process and alternate round by round, in an order that rotates.  Two
  separate processes on a shared machine differ by more than the variants do.
* *In place.*  A hook is timed where it runs: after a forward, a backward, an optimizer step and ``zero_grad`` have
  pushed the parameter objects out of the cache.  The same hook in a loop of its own looks three to six times faster.
* *Spread.*  Every figure is a median with its 10th and 90th percentile; a mean of a few rounds says nothing here.

The clock is ``time.perf_counter_ns``.  Work on a GPU is measured with events (``device_time``), never by the host's
clock around an asynchronous launch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import ddp_mp

RESULTS = pathlib.Path(__file__).parent / "results"
now = time.perf_counter_ns


@dataclass(frozen=True)
class Spread:
    """Median and 10th to 90th percentile of some measurements, in whatever unit they had."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Spread:
        ordered = sorted(v * scale for v in values)
        if not ordered:
            return cls(math.nan, math.nan, math.nan, 0)

        def at(fraction: float) -> float:
            return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

        return cls(statistics.median(ordered), at(0.1), at(0.9), len(ordered))

    def scaled(self, factor: float) -> Spread:
        ends = sorted((self.p10 * factor, self.p90 * factor))
        return Spread(self.median * factor, ends[0], ends[1], self.count)

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.p10)}-{number(self.p90)})" if self.count else "-"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if not math.isfinite(value):
        return "-"
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


def paired(
    variants: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int, warmup: int = 2, repeat: int = 2
) -> dict[str, dict[str, list[float]]]:
    """Runs every variant in every round and keeps the last of ``repeat`` calls in a row: {variant: {measure: values}}.

    The calls before the last bring this variant's own objects to the state that they have in a training loop, after the
    others have used the cache.  The garbage collector runs between rounds and not within one.
    """
    names = list(variants)
    for name in names:
        for _ in range(warmup):
            variants[name]()
    values: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    with collector_paused():
        for round_ in range(rounds):
            shift = round_ % len(names) if names else 0
            for name in names[shift:] + names[:shift]:
                for _ in range(repeat):
                    measured = variants[name]()
                for measure, value in measured.items():
                    values[name].setdefault(measure, []).append(value)
            gc.collect(0)
    return values


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class HookClock:
    """Host time spent inside the hooks of one model, by kind; time in a nested hook counts once, for the inner one.

    ``watch`` replaces a hook by one that is timed.  What the timing itself costs is measured once and taken off.
    """

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._inner: list[int] = []
        self.overhead = 0.0
        self.overhead = self._calibrate()

    def watch(self, kind: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        spent, calls, inner = self.spent, self.calls, self._inner
        spent.setdefault(kind, 0)
        calls.setdefault(kind, 0)

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            begin = now()
            try:
                return hook(*args, **kwargs)
            finally:
                taken = now() - begin
                spent[kind] += taken - inner.pop()
                calls[kind] += 1
                if inner:
                    inner[-1] += taken

        return timed

    def _calibrate(self) -> float:
        timed = self.watch("calibration", lambda *_: None)
        for _ in range(2000):
            timed(None)
        return self.spent.pop("calibration") / self.calls.pop("calibration")

    def reset(self) -> None:
        for kind in self.spent:
            self.spent[kind] = self.calls[kind] = 0

    def read(self) -> dict[str, float]:
        """Nanoseconds by kind since reset()."""
        return {kind: max(0.0, spent - self.overhead * self.calls[kind]) for kind, spent in self.spent.items()}


@contextlib.contextmanager
def silent_device_events() -> Iterator[None]:
    """Lets PyTorch's own hooks run on a machine without an accelerator.

    They create and record ``torch.Event`` and ask for the accelerator's current stream, and a CPU has neither.  Inside
    this context both are empty objects and everything else is PyTorch's own code; so a GPU's cost of real events is not
    in the figures, which flatters PyTorch's side.
    """
    if torch.accelerator.is_available():
        yield
        return

    class Event:
        def __init__(self, *_: object, **__: object) -> None: ...
        def record(self, *_: object) -> None: ...
        def wait(self, stream: object = None) -> None: ...

    class Stream:
        def wait_stream(self, _: object) -> None: ...

    stream = Stream()
    saved = torch.Event, torch.accelerator.current_stream
    torch.Event = Event  # type: ignore[misc, assignment]
    torch.accelerator.current_stream = lambda *_: stream  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        torch.Event, torch.accelerator.current_stream = saved  # type: ignore[misc]


@contextlib.contextmanager
def one_process_group(device: torch.device) -> Iterator[None]:
    """A process group of one, so that host costs can be compared in one process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_time(work: Callable[[], None], device: torch.device, repeat: int = 1) -> float:
    """Nanoseconds that ``repeat`` calls of ``work`` take, each: by events on a GPU, by the host's clock on a CPU."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e6 / repeat
    start = now()
    for _ in range(repeat):
        work()
    return (now() - start) / repeat


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure cannot be read without."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ddp_mp": ddp_mp.__version__,
        "device": "cpu",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts


@dataclass
class Report:
    """Rows of one benchmark; saved as JSON and as text, and shown as a table."""

    name: str
    title: str
    device: torch.device
    arguments: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **cells: Any) -> None:
        self.rows.append(cells)

    def table(self, width: int | None = None) -> str:
        from rich.console import Console
        from rich.table import Table

        columns: list[str] = []
        for row in self.rows:
            columns += [c for c in row if c not in columns]
        table = Table(title=self.title, title_justify="left")
        for column in columns:
            texts = all(isinstance(row.get(column, ""), str) for row in self.rows)
            table.add_column(column, justify="left" if texts else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(shown(row.get(c)) for c in columns))
        console = Console(width=width or 240, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(table)
        facts = ", ".join(f"{k}: {v}" for k, v in machine(self.device).items())
        lines = [console.export_text().rstrip(), "Median (p10-p90).", *self.notes, facts]
        return "\n".join(lines) + "\n"

    def save(self, folder: pathlib.Path, tag: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"{self.name}-{tag}" if tag else self.name
        content = {
            "benchmark": self.name,
            "title": self.title,
            "arguments": self.arguments,
            "machine": machine(self.device),
            "notes": self.notes,
            "rows": [{k: v.__dict__ if isinstance(v, Spread) else v for k, v in row.items()} for row in self.rows],
        }
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
        text = self.table()
        (folder / f"{stem}.txt").write_text(text)
        print(text, flush=True)


def shown(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return number(cell)
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell)


def bars(report: Report, path: pathlib.Path, label: str, series: Sequence[str], unit: str, log: bool = False) -> None:
    """One group of bars a row, with the spread as error bars.  Nothing is drawn where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in report.rows if any(isinstance(row.get(s), Spread) for s in series)]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(max(6, 1.1 * len(rows) + 2), 4.5), layout="constrained")
    width = 0.8 / len(series)
    for i, name in enumerate(series):
        cells = [row.get(name) for row in rows]
        spreads = [c if isinstance(c, Spread) else Spread(math.nan, math.nan, math.nan, 0) for c in cells]
        axes.bar(
            [x + (i - (len(series) - 1) / 2) * width for x in range(len(rows))],
            [s.median for s in spreads],
            width,
            label=name,
            yerr=[[max(0, s.median - s.p10) for s in spreads], [max(0, s.p90 - s.median) for s in spreads]],
            error_kw={"linewidth": 0.8},
        )
    axes.set_xticks(range(len(rows)), [str(row[label]) for row in rows], rotation=30, ha="right")
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
    axes.set_title(report.title, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


@dataclass
class Settings:
    """What every benchmark is told."""

    device: torch.device
    quick: bool
    tag: str
    output: pathlib.Path
    extra: argparse.Namespace

    def picture(self, name: str) -> pathlib.Path:
        return self.output / (f"{name}-{self.tag}.png" if self.tag else f"{name}.png")


def quiet() -> None:
    """Drops DDP's notice that it was given a mixed-precision policy."""
    logging.getLogger("torch.nn.parallel.distributed").setLevel(logging.ERROR)


def settings(
    description: str | None,
    arguments: Sequence[str] | None,
    extend: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> Settings:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of small cases, to see that it runs")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads on the CPU")
    parser.add_argument("--tag", default="", help="added to the names of the result files")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    extend(parser)
    known = parser.parse_args(arguments)
    torch.set_num_threads(known.threads)
    quiet()
    return Settings(torch.device(known.device), known.quick, known.tag, known.output, known)
