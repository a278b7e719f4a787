"""Finds the tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

# Objects nested deeper than this are not searched: enough for every output class met, and an end for cyclic ones.
_MAX_DEPTH = 8


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists, sets, mappings, dataclasses and plain objects, in order.

    Modules are not entered: what they hold is state, not output.
    """
    if type(value) is torch.Tensor:
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, _MAX_DEPTH, found)
    return found


def _collect(value: Any, depth: int, found: list[torch.Tensor]) -> None:
    # no generators, and ordinary types first: this runs in every forward, and nested generators take twice as long
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif depth > 0 and value is not None and not isinstance(value, (str, bytes, int, float, torch.nn.Module, type)):
        for child in _children(value):
            _collect(child, depth - 1, found)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, (dict, Mapping)):
        return value.values()
    if isinstance(value, (set, frozenset)):
        return value
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return getattr(value, "__dict__", {}).values()
