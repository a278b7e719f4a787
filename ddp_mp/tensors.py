"""Finds, and casts, the tensors inside whatever a module is given or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.compiler import is_compiling

from .options import FLOATING

# Objects nested deeper than this are not searched: enough for every output class met, and an end for cyclic ones.
_MAX_DEPTH = 8

# What many objects refer to is entered once, from the fourth level on: ordinary outputs, which are not that deep, cost nothing
# more (at every level a Transformer's keys and values would take 14 us instead of 8), and those that all know each other end.
_MEMO_DEPTH = _MAX_DEPTH - 3


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, lists, sets, mappings, dataclasses and plain objects, each once, in order.

    Modules are not entered: what they hold is state, not output.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    found: dict[int, torch.Tensor] = {}
    _collect(value, _MAX_DEPTH, found, {})
    return list(found.values())


def _collect(value: Any, depth: int, found: dict[int, torch.Tensor], seen: dict[int, tuple[int, Any]]) -> None:
    # no generators, and ordinary types first: this runs in every forward, and nested generators take twice as long
    if isinstance(value, (str, bytes, int, float, torch.nn.Module, type)):
        return
    if depth <= _MEMO_DEPTH:
        known = seen.get(id(value))
        if known is not None and known[0] >= depth:
            return
        seen[id(value)] = (depth, value)  # the value too: one that a property made would be gone, and its id another's
    for child in _children(value):
        if isinstance(child, torch.Tensor):
            found[id(child)] = child
        elif child is not None and depth > 1:
            _collect(child, depth - 1, found, seen)


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


def cast_tensors(value: Any, dtype: torch.dtype, widest: int = 8) -> Any:
    """``value`` with its floating-point tensors of up to ``widest`` bytes an element cast to ``dtype``, inside autograd.

    Tuples, lists, sets, mappings and dataclasses are copied where something in them changed, of the same type and with the
    same attributes; everything else, and a value in which nothing changed, is handed back as it is.  So is an immutable mapping
    that can be built neither from a mapping nor from keywords.  A tensor that occurs twice is cast once.
    """
    if isinstance(value, torch.Tensor):  # no list for the most frequent case
        return _cast(value, dtype, widest, None)
    seen: _Seen | None = None if is_compiling() else {}  # Dynamo knows no id() of a container
    return _cast_inside(value, dtype, widest, _MAX_DEPTH, [], seen)


def _cast(
    tensor: torch.Tensor, dtype: torch.dtype, widest: int, done: list[tuple[torch.Tensor, torch.Tensor]] | None
) -> torch.Tensor:
    if tensor.dtype is dtype or tensor.dtype not in FLOATING or tensor.dtype.itemsize > widest:
        return tensor
    for known, cast in done or ():  # attention asks whether query and key are one object
        if known is tensor:
            return cast
    cast = tensor.bfloat16() if dtype is torch.bfloat16 else tensor.to(dtype)  # the first takes two thirds of the time
    if done is not None:
        done.append((tensor, cast))
    return cast


# Containers that were cast, by id and the levels that were left, as what is cut off at the last level differs: with the result.
_Seen = dict[tuple[int, int], tuple[Any, Any]]


def _cast_inside(
    value: Any, dtype: torch.dtype, widest: int, depth: int, done: list[tuple[torch.Tensor, torch.Tensor]], seen: _Seen | None
) -> Any:
    if isinstance(value, torch.Tensor):
        return _cast(value, dtype, widest, done)
    if depth == 0 or not _is_container(value):
        return value
    if seen is None or depth > _MEMO_DEPTH:
        return _cast_items(value, dtype, widest, depth, done, seen)
    known = seen.get((id(value), depth))
    if known is None:
        known = value, _cast_items(value, dtype, widest, depth, done, seen)
        seen[id(value), depth] = known
    return known[1]


def _cast_items(
    value: Any, dtype: torch.dtype, widest: int, depth: int, done: list[tuple[torch.Tensor, torch.Tensor]], seen: _Seen | None
) -> Any:
    keys = _keys(value)
    old = list(value) if keys is None else [_get(value, key) for key in keys]
    new = [_cast_inside(item, dtype, widest, depth - 1, done, seen) for item in old]
    for a, b in zip(old, new, strict=True):
        if a is not b:
            return _like(value, keys, new)
    return value


def _is_container(value: Any) -> bool:
    if isinstance(value, (tuple, list, set, frozenset, Mapping)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module))


def _keys(value: Any) -> list[Any] | None:
    """Keys of a mapping, names of a dataclass's fields; None for a sequence or a set."""
    if isinstance(value, Mapping):
        return list(value.keys())
    if isinstance(value, (tuple, list, set, frozenset)):
        return None
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _get(value: Any, key: Any) -> Any:
    return value[key] if isinstance(value, Mapping) else getattr(value, key)


def _like(value: Any, keys: list[Any] | None, items: list[Any]) -> Any:
    """A container as ``value`` with other items, made past its class's constructor, which may want anything."""
    if keys is None:
        return _sequence_like(value, items)
    pairs = dict(zip(keys, items, strict=True))
    if type(value) is dict:
        return pairs
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return _immutable_like(value, pairs)
    made = copy.copy(value)
    if not isinstance(value, Mapping):
        for key, item in pairs.items():
            object.__setattr__(made, key, item)  # of a frozen dataclass too
        return made
    if not isinstance(value, dict) and not hasattr(value, "__copy__"):
        for name, own in list(getattr(made, "__dict__", {}).items()):
            if isinstance(own, (dict, list)):  # where it keeps its items: the shallow copy has that in common with the value
                made.__dict__[name] = copy.copy(own)
    for key, item in pairs.items():
        made[key] = item
    return made


def _sequence_like(value: Any, items: list[Any]) -> Any:
    kind: Any = type(value)
    made: Any
    if kind in (tuple, list, set, frozenset) or hasattr(kind, "n_sequence_fields"):  # what torch.max returns is one of the last
        return kind(items)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = items
        return made
    if hasattr(value, "_make"):  # a named tuple
        made = value._make(items)
    elif isinstance(value, set):
        made = set.__new__(kind)
        made |= set(items)
    else:
        made = (tuple if isinstance(value, tuple) else frozenset).__new__(kind, items)
    attributes = getattr(value, "__dict__", None)
    if attributes:
        made.__dict__.update(attributes)
    return made


def _immutable_like(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    """A mapping that only its constructor can fill: from a mapping or from keywords.  ``value`` itself where neither works."""
    kind: Any = type(value)
    for arguments, keywords in (((pairs,), {}), ((), pairs)):
        try:
            made = kind(*arguments, **keywords)
            if len(made) == len(pairs) and all(made[key] is item for key, item in pairs.items()):
                return made
        except Exception:  # whatever its constructor says to arguments that are not its own
            continue
    return value
