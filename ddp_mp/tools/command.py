"""The parser of arguments that all commands have in common."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """As ``argparse.ArgumentParser``, but an error is one line, and options are not abbreviated."""

    def __init__(self, command: str, description: str, *, usage: str | None = None) -> None:
        super().__init__(prog=f"python -m ddp_mp {command}".strip(), description=description, usage=usage, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Says what is wrong with the arguments, and ends the program with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (--help lists the options)\n")
