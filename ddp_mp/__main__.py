"""``python -m ddp_mp``: what this build is, whether it works here, what it costs, and how to train with it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

#: Each command is the ``main`` of the module of its name in ``ddp_mp/tools``, which is imported only when it is asked for.
COMMANDS = {
    "info": "what this build is and what it found on this machine",
    "check": "whether training gives the right numbers on this machine",
    "demo": "train a small GPT with two processes, full and mixed precision",
    "bench": "host time of the hooks, ours and PyTorch's, on this machine",
    "run": "run a program as it is, with its models patched",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m ddp_mp", description="Mixed precision for DistributedDataParallel.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, add_help=False, help=text)  # each has options of its own, --help included
    command = parser.parse_args(arguments[:1]).command
    status: int = importlib.import_module(f".tools.{command}", __package__).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
