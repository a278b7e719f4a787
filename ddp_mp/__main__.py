"""``python -m ddp_mp``: what this build is, whether it works here, and what it costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from .info import build_info


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp_mp", description="Mixed precision for DistributedDataParallel.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what this build is and what it found on this machine")
    info.add_argument("--json", action="store_true", help="as JSON")
    # these have options of their own, --help included
    commands.add_parser("check", add_help=False, help="whether training gives the right numbers on this machine")
    commands.add_parser("demo", add_help=False, help="train a small GPT with two processes, full and mixed precision")
    commands.add_parser("bench", add_help=False, help="host time of the hooks, ours and PyTorch's, on this machine")
    args, rest = parser.parse_known_args(argv)
    if args.command == "info":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return _info(args.json)
    if args.command == "check":
        from .check import main as check

        return check(rest)
    if args.command == "demo":
        from .demo import main as demo

        return demo(rest)
    from .bench import main as run_bench

    return run_bench(rest)


def _info(as_json: bool) -> int:
    info = build_info()
    if as_json:
        print(json.dumps(info, indent=2, default=str))
        return 0
    lines = list(_lines(info))
    width = max(len(key) for key, _ in lines)
    for key, value in lines:
        print(f"{key:<{width}}  {value}")
    return 0


def _lines(info: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each fact with its name; what belongs together is under one name and a dot."""
    for key, value in info.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            yield prefix + key, ", ".join(map(str, value)) or "none"
        elif isinstance(value, bool):
            yield prefix + key, "yes" if value else "no"
        else:
            yield prefix + key, str(value)


if __name__ == "__main__":
    sys.exit(main())
