"""Which parameters of a wrapped module are managed, by what name, and where they are held."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from . import _C
from .options import FLOATING


class Site(NamedTuple):
    """A place where a module keeps a parameter: ``module._parameters[key]``, of which ``parameters`` is the dictionary.

    The module is referred to weakly: a graph keeps the plan, a module may keep an output, and nobody would see that cycle.
    """

    parameters: dict[str, Any]
    reference: weakref.ref[nn.Module]
    key: str

    @property
    def module(self) -> nn.Module:
        module = self.reference()
        assert module is not None, "asked of a module that is gone"
        return module


@dataclass
class Managed:
    """One parameter of the wrapped module that DDP does not ignore: its master, and every place that holds it.

    There is more than one site when weights are tied.
    """

    name: str
    master: nn.Parameter
    sites: list[Site] = field(default_factory=list)
    sparse: bool = False  # its gradient is a sparse tensor (nn.Embedding(sparse=True)), unless it is used otherwise too
    full: bool = False  # belongs to a module that stays in full precision: not cast
    own_reduction: bool = False  # its gradient is reduced in its own type, whatever that of others is
    leaf_hook: Callable[[Any], None] | None = None  # is called when a gradient has arrived on a leaf of it

    @property
    def floating(self) -> bool:
        return self.master.dtype in FLOATING


def managed_parameters(module: nn.Module, ignored: set[str]) -> list[Managed]:
    """Every parameter of ``module`` that DDP manages, once each, in registration order (close to forward order).

    ``ignored`` are names as ``DistributedDataParallel.parameters_to_ignore`` holds them.
    """
    found: dict[int, Managed] = {}
    skipped: set[int] = set()
    for path, owner in module.named_modules():
        for key, param in owner._parameters.items():
            if param is None or id(param) in skipped:
                continue
            name = f"{path}.{key}" if path else key
            if name in ignored or getattr(param, "_ddp_ignored", False):
                skipped.add(id(param))
                found.pop(id(param), None)
                continue
            if not isinstance(param, nn.Parameter):
                continue  # a tensor that stands in for a parameter, as functional_call puts it there
            entry = found.setdefault(id(param), Managed(name, param))
            entry.sites.append(Site(owner._parameters, weakref.ref(owner), key))
            sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and bool(owner.sparse) and key == "weight"
            # tied to a layer whose gradients are dense it has dense ones, or sparse ones where only the embedding is used
            entry.sparse = sparse and (entry.sparse or len(entry.sites) == 1)
    return list(found.values())


def dense(param: torch.Tensor) -> bool:
    """Whether the engine can read the parameter's memory, and every byte of it belongs to one element."""
    try:
        return bool(_C.describe(param)["dense"])
    except BufferError:
        return False


def floating_buffers(module: nn.Module, ignored: set[str]) -> list[tuple[str, torch.Tensor]]:
    """(name, buffer) of every real floating-point buffer that DDP does not ignore, once each."""
    return [
        (name, buffer)
        for name, buffer in module.named_buffers()
        if buffer.dtype in FLOATING and name not in ignored and not getattr(buffer, "_ddp_ignored", False)
    ]


def cast_buffers(module: nn.Module, ignored: set[str], dtype: torch.dtype | None, kept: set[int]) -> None:
    """Casts the floating-point buffers in place (``.data``), so that every reference to them follows.

    ``kept``: ``id`` of buffers that stay as they are.  All or none: an error leaves every buffer as it was.
    """
    if dtype is None:
        return
    others = [b for _, b in floating_buffers(module, ignored) if b.dtype is not dtype and id(b) not in kept]
    for buffer, cast in [(b, b.to(dtype)) for b in others]:
        buffer.data = cast
