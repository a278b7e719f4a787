"""Trains every program of the gallery in three ways, on two ranks of this machine, and writes docs/gallery.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))  # where the gallery and the kit are

from gallery import NAMES, program  # noqa: E402
from gallery.compare import train  # noqa: E402
from gallery.training import line  # noqa: E402

PAGE = TESTS.parent / "docs" / "gallery.md"

INTRODUCTION = """# Gallery

Written by `make gallery` with PyTorch {version}. Each file in `tests/gallery` is a small model in the shape of a public
training program, with the loop that such a program has. It is trained for a few steps on two ranks of a CPU in three ways:
plain `DistributedDataParallel` in float32, the same inside `torch.autocast`, and patched by `ddp_mp` with the options in the
table. Everything else is the same in all three. The tests require that

* every loss is within a bound of fp32's, which the file states;
* all ranks have the same bits in every parameter;
* what `state_dict()` gives has the names, shapes and types of plain DDP, and loads there;
* training that is saved, loaded into a new program with other weights and continued has the bits of training that was not
  interrupted: losses, parameters, optimizers and averages.

Find the program that is most like yours, and begin with its options. These losses are the last ones of six steps; they say that
the three ways agree, and nothing about speed.

| program | options | fp32 | autocast | ddp_mp | what to note |
|---|---|--:|--:|--:|---|
"""


def row(name: str, losses: dict[str, list[float]]) -> str:
    """The program's line in the table."""
    kind = program(name)
    figures = " | ".join(f"{losses[way][-1]:.4f}" for way in ("fp32", "autocast", "ddp_mp"))
    return f"| `{name}.py` | `{line(kind.options)}` | {figures} | {kind.note} |"


def main() -> None:
    """Stops with an error where something does not hold."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            result = Path(folder) / name
            train(name=name, result=str(result))
            rows.append(row(name, torch.load(result)))
            print(rows[-1], flush=True)
    PAGE.write_text(INTRODUCTION.format(version=torch.__version__.split("+")[0]) + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{PAGE.name} is written")


if __name__ == "__main__":
    main()
