"""``torch.autograd.grad`` and ``backward(inputs=)`` of masters: what is asked of a master is asked of its leaves too.

A graph leads to the leaves that a forward was computed with, and to the master itself where a loss uses it directly.  Inputs
that are masters of ours are widened to both; results are summed in the master's type, differentiably.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Owner(Protocol):
    """What knows of the leaves of a wrapped module."""

    def leaves_of(self, master: torch.Tensor) -> list[torch.nn.Parameter]:
        """Every leaf that stands for a master in a graph that may still have a backward."""


class _Inputs:
    """PyTorch's way to the engine while models are patched: all that ``torch.autograd`` runs passes through it.

    Others may wrap it too, after us, and only the outermost wrapper can be taken off: below another one ours stays, and passes
    everything through.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._ours: Any = None
        self._original: Any = None

    def watch(self, owner: Owner) -> None:
        """Masters of the owner are widened from now on, while it lives."""
        self._owners.add(owner)
        home: Any = torch.autograd
        if self._ours is None:
            self._original = home._engine_run_backward
            self._ours = home._engine_run_backward = self._wrapper(self._original)

    def forget(self, owner: Owner) -> None:
        """The owner is patched no more."""
        self._owners.discard(owner)
        home: Any = torch.autograd
        if not self._owners and home._engine_run_backward is self._ours:
            home._engine_run_backward = self._original
            self._ours = self._original = None

    def _wrapper(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = args[3] if len(args) > 3 else ()  # behind gradients and two flags
            leaves = self._leaves(inputs) if inputs else None
            if leaves is None:
                return original(outputs, *args, **kwargs)
            wide = tuple(tensor for value, more in zip(inputs, leaves, strict=True) for tensor in (value, *more))
            if len(args) == 4:  # torch.autograd.backward
                return original(outputs, *args[:3], wide, **kwargs)
            found = iter(original(outputs, *args[:3], wide, True, *args[5:], **kwargs))  # one of several may be unused
            sums = [_sum(value, [next(found) for _ in (value, *more)]) for value, more in zip(inputs, leaves, strict=True)]
            if not args[4]:
                _require_used(sums)
            return tuple(sums)

        return run

    def _leaves(self, inputs: Sequence[Any]) -> list[list[torch.nn.Parameter]] | None:
        """For each input the leaves that stand for it; None where there is none at all."""
        if not any(isinstance(value, torch.nn.Parameter) for value in inputs):
            return None
        owners = list(self._owners)
        leaves = [[leaf for owner in owners for leaf in owner.leaves_of(value)] for value in inputs]
        return leaves if any(leaves) else None


def _sum(master: Any, found: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of what the engine found for a master and its leaves; the user's hooks on the master see what leaves had."""
    total, on_leaves = found[0], [part.to(master.dtype) for part in found[1:] if part is not None]
    if not on_leaves:
        return total
    part = functools.reduce(torch.add, on_leaves)
    for hook in list((master._backward_hooks or {}).values()):
        changed = hook(part)
        part = part if changed is None else changed
    return part if total is None else total + part


def _require_used(sums: Sequence[torch.Tensor | None]) -> None:
    for index, value in enumerate(sums):
        if value is None:
            raise RuntimeError(
                f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )


inputs = _Inputs()
