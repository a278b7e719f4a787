"""Models with the parameters of real architectures, built from the lists in this folder, or after a model of the user's.

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

FOLDER = pathlib.Path(__file__).parent
#: Modules that hold others and are never called themselves.
CONTAINERS = {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}


def names() -> list[str]:
    """Of the lists."""
    return sorted(f.stem for f in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    """One list, as it is stored."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def expanded(children: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and node of every child, ``"0-11"`` twelve times."""
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
        """``x`` plus an element of every parameter below."""
        for parameter in self._parameters.values():
            if parameter is not None:
                # Two reads of one element: cheap, and its gradient is as large as the parameter.
                x = x + parameter.view(-1)[:1].sum()
        for child in called(self):
            x = child(x)
        return x

    def extra_repr(self) -> str:
        """The kind."""
        return self.kind


def called(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a call of this one calls."""
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


def stand_in(module: nn.Module, *, real_size: bool = False, divisor: int = 48, at_most: int = 64) -> nn.Module:
    """A model with the modules of another one, and with parameters of its names, shapes, types and ties.

    Only what the other one is made of is looked at, so that it may be on the meta device.
    """
    twins: dict[int, nn.Parameter] = {}
    modules: dict[int, Node] = {}

    def parameter_like(name: str, original: nn.Parameter) -> nn.Parameter:
        if isinstance(original, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run a forward of the model before it is returned")
        if original.is_complex() or original.layout is not torch.strided:
            kind = original.dtype if original.is_complex() else original.layout
            raise ValueError(f"parameter {name!r} is {kind}: such a model can only be timed with its own forward")
        sides = list(original.shape) if real_size else tiny(list(original.shape), divisor, at_most)
        value = torch.zeros(sides, dtype=original.dtype)
        return nn.Parameter(value, requires_grad=original.requires_grad)

    def make(original: nn.Module, path: str) -> Node:
        if id(original) in modules:
            return modules[id(original)]
        holds_modules = isinstance(original, (nn.ModuleList, nn.ModuleDict))
        # whatever the user's class is called: only what holds modules is not called, a list of parameters is
        node = modules[id(original)] = Node("ModuleList" if holds_modules else "Module")
        for key, parameter in original._parameters.items():
            if parameter is not None and id(parameter) not in twins:
                twins[id(parameter)] = parameter_like(f"{path}{key}", parameter)
            node.register_parameter(key, None if parameter is None else twins[id(parameter)])
        for key, child in original.named_children():
            node.add_module(key, make(child, f"{path}{key}."))
        return node

    return make(module, "")


def loss_of(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Of a model of this file: something to call ``backward()`` of."""
    out: torch.Tensor = model(torch.zeros((), device=device))
    return out.float().sum()
