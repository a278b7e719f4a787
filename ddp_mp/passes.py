"""Forward passes that a backward may still come for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .low import Copies


class Pass:
    """One forward of the root module that was computed with gradients.

    Attributes:
        copies: the low-precision copies that its graph was computed with; None when nothing is cast.
        epoch: the epoch of ``LowPrecision`` that its gradient accumulators belong to.
        sync: whether its backward is to be reduced; set at the end of the wrapper's forward, used up by one backward.
        done: whether a backward has gone through it.
        abandoned: the model is not patched any more: a backward would leave low-precision gradients.
    """

    __slots__ = ("_anchor", "abandoned", "copies", "done", "epoch", "sync")

    def __init__(self, copies: Copies | None, epoch: int) -> None:
        self.copies, self.epoch = copies, epoch
        self.sync = False
        self.done = False
        self.abandoned = False
        self._anchor: weakref.ref[OutputHook] | None = None

    @property
    def pending(self) -> bool:
        """Whether a backward may still come: none has, and the graph (or an output) is alive."""
        return not self.done and (self._anchor is None or self._anchor() is not None)

    @property
    def anchored(self) -> bool:
        """Whether the end of its graph can be seen."""
        return self._anchor is not None

    def watch(self, outputs: list[torch.Tensor], on_backward: Callable[[Pass], None]) -> None:
        """Calls ``on_backward(self)`` when a backward reaches any of the outputs.

        The hook object belongs to the graph alone: its life is the graph's.
        """
        hook = OutputHook(self, on_backward)
        self._anchor = weakref.ref(hook)
        for tensor in outputs:
            tensor.register_hook(hook)


class OutputHook:
    """A tensor hook on the outputs of one forward."""

    __slots__ = ("__weakref__", "_on_backward", "_pass")

    def __init__(self, owner: Pass, on_backward: Callable[[Pass], None]) -> None:
        self._pass, self._on_backward = owner, on_backward

    def __call__(self, grad: Any) -> None:
        if self._pass.abandoned:
            raise RuntimeError(
                "ddp_mp: the model was unpatched, or its wrapper dropped, after the forward that this backward belongs to: "
                "gradients would be in low precision and not reduced; run the forward again"
            )
        self._on_backward(self._pass)
