"""``python -m ddp_mp``: what this build is."""

from __future__ import annotations

import argparse
import json
import sys

from .info import build_info


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp_mp", description="Mixed precision for DistributedDataParallel.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="what this build is and what it found on this machine")
    info.add_argument("--json", action="store_true", help="as JSON")
    # these two have options of their own, --help included
    commands.add_parser("demo", add_help=False, help="train a small GPT with two processes, full and mixed precision")
    commands.add_parser("bench", add_help=False, help="host time of the hooks, ours and PyTorch's, on this machine")
    args, rest = parser.parse_known_args(argv)
    if args.command == "info":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return _info(args.json)
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
    width = max(len(key) for key in info)
    for key, value in info.items():
        print(f"{key:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
