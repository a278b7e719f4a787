"""How everything here is measured: paired, in one process, inside real training steps.

Host times of microseconds depend on what the caches hold, on the clock of the core and on who else uses the machine.
Three rules follow, and this file exists to make them the easy way:

* *Paired.*  Variants that are compared run in one process and alternate round by round, in an order that rotates.  Two
  separate processes on a shared machine differ by more than the variants do.
* *In place.*  A hook is timed where it runs: after a forward, a backward, an optimizer step and ``zero_grad`` have
  pushed the parameter objects out of the cache.  The same hook in a loop of its own looks three to six times faster.
* *Spread.*  Every figure is a median with its 10th and 90th percentile; a mean of a few rounds says nothing here.

The measuring itself is in ``ddp_mp/tools/measure.py``, so that an installed package has it; here is what belongs to a report.
The clock is ``time.perf_counter_ns``.  Work on a GPU is measured with events (``device_time``), never by the host's
clock around an asynchronous launch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import pathlib
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import ddp_mp
from ddp_mp.tools import shapes
from ddp_mp.tools.measure import Spread, now, number

RESULTS = pathlib.Path(__file__).parent / "results"


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


def behind_a_wait(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    """Nanoseconds that a device takes for each of ``works``, all enqueued before the first one begins.

    The clock of a GPU starts behind a kernel that idles for twice as long as the host takes to enqueue them.  A CPU has no
    queue, and the host's clock is read.
    """

    def enqueue() -> None:
        for work in works:
            work()

    if device.type != "cuda":
        return device_time(enqueue, device) / len(works)
    torch.cuda.synchronize(device)
    start = now()
    enqueue()
    taken = now() - start
    torch.cuda.synchronize(device)
    # clock_rate is in kHz, so this is in cycles.
    torch.cuda._sleep(int(2 * max(taken, 500_000) * clock_rate(device) / 1e6))
    return device_time(enqueue, device) / len(works)


def clock_rate(device: torch.device) -> int:
    """Of a GPU's multiprocessors, in kHz; more than any has where PyTorch does not say."""
    return int(getattr(torch.cuda.get_device_properties(device), "clock_rate", 2_500_000))


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def scheduling() -> str:
    """Whether this process had real-time priority: then ``load`` says little."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    realtime = (os.SCHED_FIFO, os.SCHED_RR)
    return "real-time" if os.sched_getscheduler(0) in realtime else "ordinary"


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure cannot be read without."""
    facts: dict[str, Any] = {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads(),
        "scheduling": scheduling(),
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
        """Writes both files, and shows the table."""
        print(self.write(folder, tag), flush=True)

    def write(self, folder: pathlib.Path, tag: str) -> str:
        """Writes both files as far as there are rows, and returns the table."""
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
        return text


def shown(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return number(cell)
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell)


#: A variant has the same colour in every picture; peers that are limits are grey.
COLORS = {
    "ddp_mp": "tab:orange",
    "pytorch": "tab:blue",
    "copy_": "tab:blue",
    "python": "tab:cyan",
    "foreach": "tab:cyan",
    "autocast": "tab:green",
    "replicate": "tab:purple",
    "bf16": "0.55",
    "fp32": "0.8",
    "plain copy": "0.8",
}


def bars(report: Report, path: pathlib.Path, label: str, series: Sequence[str], unit: str, log: bool = False) -> None:
    """One group of bars a row, with its value and the spread as error bars.  Nothing is drawn where matplotlib is missing."""
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
        drawn = axes.bar(
            [x + (i - (len(series) - 1) / 2) * width for x in range(len(rows))],
            [s.median for s in spreads],
            width,
            label=name,
            color=COLORS.get(name),
            yerr=[[max(0, s.median - s.p10) for s in spreads], [max(0, s.p90 - s.median) for s in spreads]],
            error_kw={"linewidth": 0.8, "ecolor": "0.3"},
        )
        texts = [number(s.median) if s.count else "" for s in spreads]
        axes.bar_label(drawn, texts, label_type="center", rotation=90, fontsize=6)
    names = [str(row[label]) for row in rows]
    turned: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, names)) > 8 else {}
    axes.set_xticks(range(len(rows)), names, **turned)
    axes.set_ylabel(unit)
    if log:  # bars need a bottom: the power of ten below them all
        lowest = min(s.p10 for row in rows for s in map(row.get, series) if isinstance(s, Spread) and s.p10 > 0)
        axes.set_yscale("log")
        axes.set_ylim(bottom=10 ** math.floor(math.log10(lowest)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(report.title, fontsize=10, loc="left")
    figure.legend(fontsize=8, ncols=len(series), loc="outside lower center", frameon=False)
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


def model_names(text: str) -> list[str]:
    """The argument of ``--models``: names of shape lists, with commas."""
    names = text.split(",")
    unknown = [name for name in names if name not in shapes.names()]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such model: {', '.join(unknown)}; there are {', '.join(shapes.names())}")
    return names


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
