"""Bandwidth of the extension built otherwise: what `csrc/cuda/launch.h` and `cast.cu` leave to a benchmark to choose.

    python -m benchmarks.variants --device cuda [--quick]

Each variant is built in a copy of the sources, in ``build/variants``, and measured by ``benchmarks.bandwidth`` in a process of
its own, one after the other; the first one again at the end, which shows how far two runs of the same are apart.  Variants of
the kernel need nvcc.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Report, Settings, settings
from ddp_mp.tools.measure import Spread

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "variants"
COPIED = ("setup.py", "csrc", "ddp_mp", "benchmarks", "scripts", "tests/kit/c")


@dataclass(frozen=True)
class Variant:
    """How it is called, and what the C compiler and nvcc are told."""

    name: str
    host: str = ""
    kernel: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name.replace(" ", "-")


VARIANTS = (
    Variant("as shipped"),
    Variant("1 block aside", host="-DMP_CUDA_PRIVATE_BLOCKS=1"),
    Variant("4 blocks aside", host="-DMP_CUDA_PRIVATE_BLOCKS=4"),
    Variant("small chunks", host="-DMP_CUDA_SHIFT_MIN=9 -DMP_CUDA_SHIFT_MAX=13 -DMP_CUDA_CHUNKS_PER_WARP=2"),
    Variant("groups of 8", kernel="-DMP_GROUP=8"),
    Variant("128 bytes in flight", kernel="-DMP_IN_FLIGHT=128"),
    Variant("not in sequence", kernel="-DMP_IN_SEQUENCE=0"),
)


def build(variant: Variant) -> str:
    """Builds a variant; returns what the compiler said when that failed."""
    shutil.rmtree(variant.folder, ignore_errors=True)
    for name in COPIED:
        if (ROOT / name).is_file():
            variant.folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, variant.folder / name)
        else:
            shutil.copytree(ROOT / name, variant.folder / name, ignore=shutil.ignore_patterns("*.so", "results", "__pycache__"))
    images = ROOT / "build" / "cuda"
    if not variant.kernel and images.is_dir():
        shutil.copytree(images, variant.folder / "build" / "cuda")
    flags = {"CFLAGS": variant.host, "NVCC_APPEND_FLAGS": variant.kernel}
    environment = {**os.environ, **{name: f"{os.environ.get(name, '')} {value}".strip() for name, value in flags.items()}}
    command = [sys.executable, str(variant.folder / "scripts" / "build_in_place.py")]
    done = subprocess.run(command, cwd=variant.folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["the build failed"])[-1]
    return "nvcc did not make this kernel" if variant.kernel and "; nvcc " not in done.stdout else ""


def measured(variant: Variant, s: Settings) -> list[dict[str, object]]:
    """Rows of the bandwidth of a variant that was built."""
    command = [sys.executable, "-m", "benchmarks.bandwidth", "--device", s.device.type, "--ours", "--output", "bandwidth"]
    if s.quick:
        command.append("--quick")
    environment = {**os.environ, "PYTHONPATH": str(variant.folder)}
    subprocess.run(command, cwd=variant.folder, env=environment, check=True, capture_output=True, text=True)
    rows: list[dict[str, object]] = json.loads((variant.folder / "bandwidth" / "bandwidth.json").read_text())["rows"]
    return rows


def add(report: Report, variant: Variant, rows: Sequence[dict[str, object]]) -> None:
    """A row for each list of tensors: the figures of what is ours side by side."""
    by_tensors: dict[object, dict[str, Spread]] = {}
    for row in rows:
        if row["how"] != "_foreach_copy_":
            by_tensors.setdefault(row["tensors"], {})[f"{row['work']}, {row['how']}"] = Spread(**row["GB/s"])  # type: ignore
    for tensors, figures in by_tensors.items():
        report.add(variant=variant.name, tensors=tensors, **figures)


def main(arguments: Sequence[str] | None = None) -> int:
    s = settings(__doc__, arguments)
    report = Report("variants", "bandwidth of the extension built otherwise, GB/s", s.device, {})
    variants = VARIANTS[:2] if s.quick else VARIANTS
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        failures = dict(zip(variants, pool.map(build, variants), strict=True))
    for variant in (*variants, variants[0]):
        if failures[variant]:
            report.notes.append(f"{variant.name}: {failures[variant]}")
            continue
        try:
            add(report, variant, measured(variant, s))
        except subprocess.CalledProcessError as error:
            report.notes.append(f"{variant.name}: {(error.stderr.strip().splitlines() or ['it failed'])[-1]}")
        report.write(s.output, s.tag)
    report.save(s.output, s.tag)
    return 0 if report.rows else 1


if __name__ == "__main__":
    sys.exit(main())
