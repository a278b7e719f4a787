"""What this build is and what it found on this machine: ``python -m ddp_mp info``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..stats import build_info
from .command import Parser


def main(arguments: Sequence[str] = ()) -> int:
    """``python -m ddp_mp info``; returns the exit status."""
    parser = Parser("info", "Says what this build is and what it found on this machine.")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    args = parser.parse_args(list(arguments))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    info = {**build_info(), "gpus": gpus or "none: PyTorch finds no CUDA device"}
    if args.json:
        print(json.dumps(info, indent=2, default=str))
        return 0
    lines = list(lines_of(info))
    width = max(len(key) for key, _ in lines)
    for key, value in lines:
        print(f"{key:<{width}}  {value}")
    return 0


def lines_of(info: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each fact with its name; facts that belong together have a common name, a dot and a name of their own."""
    for key, value in info.items():
        if isinstance(value, dict):
            yield from lines_of(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            yield prefix + key, ", ".join(map(str, value)) or "none"
        elif isinstance(value, bool):
            yield prefix + key, "yes" if value else "no"
        else:
            yield prefix + key, str(value)
