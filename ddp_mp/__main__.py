"""``python -m ddp_mp``: what this build is, whether it works here, what it costs, and how to train with it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ._version import __version__
from .tools.command import Parser

#: Each command is the ``main`` of the module of its name in ``ddp_mp/tools``, which is imported only when it is asked for.
COMMANDS = {
    "info": "say what this build is and what it found on this machine",
    "check": "test whether training gives the right numbers on this machine",
    "demo": "train a small GPT with two processes, in full and in mixed precision",
    "bench": "time the hooks, or whole training steps, of your model on this machine",
    "run": "run your program unchanged, with mixed precision in every model that it wraps",
}

EPILOG = "python -m ddp_mp COMMAND --help lists the options of a command."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser("", "Mixed precision for PyTorch's DistributedDataParallel.", usage="python -m ddp_mp command [options]")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["commands:", *(f"  {name:<6} {text}" for name, text in COMMANDS.items()), "", EPILOG])
    parser.add_argument("--version", action="version", version=f"ddp_mp {__version__}", help="print the version and exit")
    parser.add_argument("command", help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    command = parser.parse_args(arguments[:1]).command
    if command not in COMMANDS:
        parser.error(f"there is no command {command!r}; choose one of {', '.join(COMMANDS)}")
    status: int = importlib.import_module(f".tools.{command}", __package__).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
