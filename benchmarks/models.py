"""Models with the parameters of real architectures, built from the lists in ``shapes/``.

Each list is the module tree that a published architecture has in the ``transformers`` library at its usual size:
kinds, names and shapes, no weights.  A node is ``{"kind", "parameters": {name: shape or "=twin"}, "children": {...}}``;
a child called ``"0-11"`` stands for twelve equal ones, and ``"=twin"`` for a tied parameter.

What is built computes nothing sensible.  Every module that would be called is called, every parameter takes part in the
output once per module that holds it, and every gradient has the parameter's full shape: that is all that hooks can see.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FOLDER = pathlib.Path(__file__).parent / "shapes"
#: Modules that hold others and are never called themselves.
CONTAINERS = {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}


def names() -> list[str]:
    return sorted(f.stem for f in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def expanded(children: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, node in children.items():
        first, dash, last = key.partition("-")
        if dash and first.isdigit() and last.isdigit():
            yield from ((str(i), node) for i in range(int(first), int(last) + 1))
        else:
            yield key, node


class Node(nn.Module):
    """A module of the tree."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self._parameters.values():
            if parameter is not None:
                # Two reads of one element: cheap, and its gradient is as large as the parameter.
                x = x + parameter.view(-1)[:1].sum()
        for child in called(self):
            x = child(x)
        return x

    def extra_repr(self) -> str:
        return self.kind


def called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, Node) and child.kind in CONTAINERS:
            yield from called(child)
        else:
            yield child


def tiny(shape: list[int], divisor: int, at_most: int) -> list[int]:
    """The shape with every side divided, so that bandwidth is out of the picture and the number of parameters stays."""
    return [max(1, min(at_most, math.ceil(side / divisor))) for side in shape]


def build(name: str, *, real_size: bool = False, tied: bool = False, divisor: int = 48, at_most: int = 64) -> nn.Module:
    """The model of a list.  ``tied=False`` leaves out a parameter's second place: PyTorch's hooks cannot train it."""
    by_name: dict[str, nn.Parameter] = {}
    generator = torch.Generator().manual_seed(0)
    later: list[tuple[nn.Module, str, str]] = []

    def make(node: dict[str, Any], path: str) -> Node:
        module = Node(node["kind"])
        for key, shape in node.get("parameters", {}).items():
            if isinstance(shape, str):
                later.append((module, key, shape[1:]))
                continue
            sides = shape if real_size else tiny(shape, divisor, at_most)
            value = torch.randn(sides, generator=generator).mul_(0.02)
            by_name[f"{path}{key}"] = nn.Parameter(value)
            module.register_parameter(key, by_name[f"{path}{key}"])
        for key, child in expanded(node.get("children", {})):
            module.add_module(key, make(child, f"{path}{key}."))
        return module

    root = make(load(name)["root"], "")
    for module, key, twin in later:
        module.register_parameter(key, by_name[twin] if tied else None)
    return root


def made_up(parameters: int, elements: int, per_module: int = 2) -> nn.Module:
    """A flat model of as many parameters as asked for, ``elements`` together, ``per_module`` in each module."""
    root = Node("MadeUp")
    each = max(1, elements // max(1, parameters))
    for first in range(0, parameters, per_module):
        child = Node("Layer")
        for i in range(min(per_module, parameters - first)):
            child.register_parameter(f"p{i}", nn.Parameter(torch.randn(each).mul_(0.02)))
        root.add_module(str(first // per_module), child)
    return root


def loss_of(model: nn.Module, device: torch.device) -> torch.Tensor:
    out: torch.Tensor = model(torch.zeros((), device=device))
    return out.float().sum()
