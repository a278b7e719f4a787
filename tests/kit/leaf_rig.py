"""Masters, their leaves and a ``_C.Gradients`` over them, without a model: for tests of the extension's own types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from kit.inside import _C


class Rig:
    """Rows of some shapes; every gradient that arrives goes through the hooks, as autograd calls them.

    Args:
        masters: the full-precision parameters.
        buckets: rows of each bucket.
        dtype: of the leaves; None: rows have none.
    """

    def __init__(self, masters: Sequence[nn.Parameter], buckets: Sequence[Sequence[int]], dtype: Any = torch.bfloat16) -> None:
        self.masters, self.buckets = list(masters), [list(rows) for rows in buckets]
        self.leaves = [nn.Parameter(torch.empty_like(m, dtype=dtype)) for m in masters] if dtype is not None else []
        self.events: list[Any] = []
        self.on: dict[str, Callable[..., None]] = {}
        self.g = _C.Gradients(
            self.masters,
            [f"p{row}" for row in range(len(self.masters))],
            self.buckets,
            [dtype is not None] * len(self.masters),
            lambda *args: self._told("first", *args),
            lambda *args: self._told("ready", *args),
            lambda *args: self._told("special", *args),
            lambda *args: self._told("error", *args),
        )
        self.hooks = [self.g.hook(row) for row in range(len(self.masters))]

    def _told(self, what: str, *args: Any) -> None:
        self.events.append((what, *args))
        if what in self.on:
            self.on[what](*args)

    def fire(self, row: int, grad: torch.Tensor | None, leaf: nn.Parameter | None = None) -> None:
        """``grad`` is accumulated on the row's leaf."""
        leaf = self.leaves[row] if leaf is None else leaf
        leaf.grad = grad
        self.hooks[row](leaf)

    def fire_master(self, row: int) -> None:
        """A gradient was accumulated on the master."""
        self.hooks[row](self.masters[row])

    def numel(self, bucket: int) -> int:
        """Elements of a bucket."""
        return sum(self.masters[row].numel() for row in self.buckets[bucket])

    def parts(self, bucket: int, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat buffer with the shape and strides of each row's master."""
        views, offset = [], 0
        for row in self.buckets[bucket]:
            master = self.masters[row]
            views.append(flat[offset : offset + master.numel()].as_strided(master.shape, master.stride()))
            offset += master.numel()
        return views


def masters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters of these shapes."""
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def grad_of(master: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A random gradient with the master's shape and strides."""
    return torch.randn_like(master.detach(), dtype=dtype)
