"""What a step of each model list asks of a GPU: kernels, event records and bytes of their arguments.  Nothing is timed.

    python -m benchmarks.launches [--models bert_base,gpt2_xl]

Counted from the plan, so that no GPU is needed: a cast bucket is a list of rows on the private stream and one event; a
gradient bucket is one list on the backward's stream, packed and handed over in place.  A list of more rows than the
arguments of one kernel hold (``MP_CUDA_ROWS`` of ``csrc/cuda/launch.h``) is several kernels.  Before all casts there is one
event more, by which they come after the caller's work.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness import Report, model_names, settings
from ddp_mp import _C, Options
from ddp_mp.tools import shapes

LAUNCH = pathlib.Path(__file__).parents[1] / "csrc" / "cuda" / "launch.h"
#: Bytes of a row, and of the numbers beside the rows: kernel_row and batch of csrc/cuda/launch.c.
ROW, NUMBERS = 40, 24


def most_rows() -> int:
    """Rows of one launch."""
    (found,) = re.findall(r"^#define MP_CUDA_ROWS (\d+)$", LAUNCH.read_text(), re.MULTILINE)
    return int(found)


def sides(node: dict[str, Any]) -> Iterator[list[int]]:
    """The shapes of a node's own parameters and of those below; a tied one counts once."""
    yield from (shape for shape in node.get("parameters", {}).values() if not isinstance(shape, str))
    for _, child in shapes.expanded(node.get("children", {})):
        yield from sides(child)


def kernels(lists: Sequence[int], most: int) -> int:
    """Of lists with so many rows."""
    return sum(math.ceil(rows / most) for rows in lists)


def packed(numels: Sequence[int]) -> list[int]:
    """Rows of each gradient bucket of float32: from the last parameter on, of 1 MiB and then of 25, as DDP's are."""
    lists, held = [0], 0
    for numel in reversed(numels):
        if held >= (25 if len(lists) > 1 else 1) * 2**20:
            lists.append(0)
            held = 0
        lists[-1] += 1
        held += 4 * numel
    return lists


def count(name: str, most: int) -> dict[str, Any]:
    """One line of the report."""
    numels = [math.prod(shape) for shape in sides(shapes.load(name)["root"])]
    options = Options()
    plan = _C.plan(numels, "bfloat16", options.first_bucket_bytes, options.bucket_bytes)
    casts = [rows for _, rows, _ in plan["buckets"]]
    packs = packed(numels)
    launched = kernels(casts, most) + kernels(packs, most)
    return {
        "model": name,
        "parameters": len(numels),
        "cast buckets": len(casts),
        "most cast rows": max(casts),
        "cast kernels": kernels(casts, most),
        "gradient buckets": len(packs),
        "most pack rows": max(packs),
        "pack kernels": kernels(packs, most),
        "kernels": launched,
        "events": len(casts) + 1,
        "argument bytes": launched * (most * ROW + NUMBERS),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", type=model_names, default=shapes.names())

    s = settings(__doc__, arguments, extend)
    most = most_rows()
    report = Report("launches", "kernels of a step, from the plan", s.device, {"rows of one launch": most})
    for name in s.extra.models:
        report.add(**count(name, most))
    report.save(s.output, s.tag)
    return 0


if __name__ == "__main__":
    sys.exit(main())
