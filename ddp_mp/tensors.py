"""Finds the tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Objects nested deeper than this are not searched: enough for every output class met, and an end for cyclic ones.
_MAX_DEPTH = 8


def tensors_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Yields the tensors of nested tuples, lists, sets, mappings, dataclasses and plain objects, in order.

    Modules are not entered: what they hold is state, not output.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module, type)):
        return
    else:
        for child in _children(value):
            yield from tensors_in(child, depth - 1)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield getattr(value, field.name, None)
    else:
        yield from getattr(value, "__dict__", {}).values()
