"""Finds what autograd has of a parameter in a graph that the parameter does not know any more.

``torch.autograd.grad(loss, parameter)`` and ``loss.backward(inputs=...)`` look for the node that the parameter calls its
gradient accumulator.  PyTorch makes the parameter forget it when its type changes.  A graph that a switch to masters has left
behind (``loss.backward(retain_graph=True)``, a ``state_dict()`` before the backward) still leads to that node, and is asked for
another.  While there is such a graph, inputs that are parameters become the nodes that are found in the graph itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge


class Owner(Protocol):
    """What knows of the graphs of a wrapped module."""

    def may_go_on(self) -> bool:
        """Whether a backward may still come for any of them."""

    def switches(self, value: object) -> bool:
        """Whether this is a parameter that is switched between master and copy."""


class _Inputs:
    """PyTorch's way to the engine while graphs are watched: all that ``torch.autograd`` runs passes through it.

    Others may wrap it too, after us, and only the outermost wrapper can be taken off: below another one ours stays, and passes
    everything through.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._ours: Any = None
        self._original: Any = None

    def watch(self, owner: Owner) -> None:
        """The owner's graphs outlive what its parameters know of them, until none of them may go on."""
        self._owners.add(owner)
        home: Any = torch.autograd
        original = getattr(home, "_engine_run_backward", None)
        if self._ours is None and original is not None:
            self._ours, self._original = self._wrapper(original), original
            home._engine_run_backward = self._ours

    def _wrapper(self, original: Any) -> Any:
        @functools.wraps(original)
        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            owners = self._watching()
            edges = _edges(owners, outputs, args[3]) if owners and len(args) > 3 else None  # behind gradients and two flags
            if edges is None:
                return original(outputs, *args, **kwargs)
            flat = tuple(edge for several in edges for edge in several)
            if len(args) == 4:  # torch.autograd.backward
                return original(outputs, *args[:3], flat, **kwargs)
            found = original(outputs, *args[:3], flat, True, *args[5:], **kwargs)  # one of several may be unused
            sums = _sums(found, [len(several) for several in edges])
            if not args[4]:
                _require_used(sums)
            return sums

        return run

    def _watching(self) -> list[Owner]:
        """Whose graphs may still go on; our wrapper goes with the last of them."""
        owners = [owner for owner in list(self._owners) if owner.may_go_on()]
        if not owners:
            self._owners.clear()
            self._take_off()
        return owners

    def _take_off(self) -> None:
        home: Any = torch.autograd
        if home._engine_run_backward is self._ours:
            home._engine_run_backward = self._original
            self._ours = self._original = None


def _edges(owners: list[Owner], outputs: Any, inputs: Any) -> list[list[Any]] | None:
    """In the place of each input, what stands for it in the graph; None: the inputs themselves."""
    switched = {id(value) for value in inputs if any(owner.switches(value) for owner in owners)}
    nodes = _accumulators(outputs, switched) if switched else {}
    if not nodes:
        return None
    return [[GradientEdge(node, 0) for node in nodes[id(value)]] if id(value) in nodes else [value] for value in inputs]


def _accumulators(outputs: Iterable[Any], wanted: set[int]) -> dict[int, list[Any]]:
    """By the id of a parameter: its gradient accumulators in the graph, more than one where it was switched in between."""
    found: dict[int, list[Any]] = {}
    waiting: list[Any] = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            waiting += [following for following, _ in node.next_functions]
        elif id(node.variable) in wanted:
            found.setdefault(id(node.variable), []).append(node)
    return found


def _sums(found: tuple[torch.Tensor | None, ...], counts: list[int]) -> tuple[torch.Tensor | None, ...]:
    """The sums of so many each."""
    sums: list[torch.Tensor | None] = []
    parts = iter(found)
    for count in counts:
        several = [part for part in (next(parts) for _ in range(count)) if part is not None]
        sums.append(functools.reduce(torch.add, several) if several else None)
    return tuple(sums)


def _require_used(sums: tuple[torch.Tensor | None, ...]) -> None:
    for index, value in enumerate(sums):
        if value is None:
            raise RuntimeError(
                f"The differentiated Tensor at index {index} appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )


inputs = _Inputs()
