"""What the tools show: progress and tables, with ``tqdm`` and ``rich`` where they are installed."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Literal

Align = Literal["left", "right"]


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def progress(steps: range, visible: bool, unit: str = "step") -> Any:
    if visible and installed("tqdm"):
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

        return tqdm(steps, unit=unit, dynamic_ncols=True)
    return steps


def terminal_columns() -> float:
    """How many characters fit into a line; without end where the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def show_upright(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table too wide for the terminal: each row as lines of its own."""
    width = max(map(len, header))
    for row in rows:
        print(row[0])
        for name, cell in zip(header[1:], row[1:], strict=True):
            print(f"  {name:<{width}}  {cell}")


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], align: Align = "right") -> None:
    if installed("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title)
        for i, name in enumerate(header):
            table.add_column(name, overflow="fold", justify="left" if i == 0 else align)
        for row in rows:
            table.add_row(*row)
        console = Console()
        Console(width=None if console.is_terminal else max(console.width, 160)).print(table)
        return
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(title)
    if sum(widths) + 2 * (len(widths) - 1) > terminal_columns():
        show_upright(header, rows)
        return
    for line in lines:
        print(
            "  ".join(
                cell.ljust(w) if i == 0 or align == "left" else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
        )
