"""What this build is and what it found on this machine: ``python -m ddp_mp info``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..info import build_info


def main(arguments: Sequence[str] = ()) -> int:
    """``python -m ddp_mp info``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp_mp info", description=(__doc__ or "").split(":")[0] + ".")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parser.parse_args(list(arguments))
    info = build_info()
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
