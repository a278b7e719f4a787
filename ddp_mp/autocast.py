"""``Options.autocast``: a module's forward runs in autocast of ``param_dtype``, whoever calls it.

The forward itself is replaced on the instance, so that no exception and no interrupt leaves autocast behind, and so that
torch.compile sees an ordinary context manager.  Where somebody else's function stands on the instance when the wrapper is
called, as PyTorch Lightning puts one there for each step, the wrapper's call runs in autocast instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .leaves import Region


class AutocastForward:
    """The forward of one module, inside autocast or, where ``dtype`` is None, outside of it.

    Args:
        module: its instance gets a ``forward`` of its own until :meth:`remove`.
        dtype: the type of autocast; None: autocast is off inside.
        region: says whether the patched model computes in low precision now; outside of that nothing is changed.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, region: Region) -> None:
        self._module = module
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")  # some libraries put theirs on the instance
        kinds = {p.device.type for p in module.parameters()} | {b.device.type for b in module.buffers()}
        kind = next(iter(kinds - {"cpu"}), "cpu")
        self._autocast = autocast = functools.partial(torch.autocast, kind, dtype=dtype, enabled=dtype is not None)
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not region.low:
                return original(*args, **kwargs)
            with autocast():
                return original(*args, **kwargs)

        forward.__dict__["ddp_mp_own"] = self._own
        module.__dict__["forward"] = self._forward = forward

    def around_call(self) -> contextlib.AbstractContextManager[Any]:
        """What a call of the module by its wrapper is to run in: autocast, unless our forward is in place and does the same."""
        ours, _ = own_forward(self._module.__dict__.get("forward"))
        return contextlib.nullcontext() if ours else self._autocast()

    def remove(self) -> None:
        """The module's own forward again.  One that somebody has put around ours stays, and passes everything through."""
        if self._module.__dict__.get("forward") is self._forward:
            if self._own is None:
                del self._module.__dict__["forward"]
            else:
                self._module.__dict__["forward"] = self._own


def own_forward(forward: Any) -> tuple[bool, Callable[..., Any] | None]:
    """Whether this is a forward that :class:`AutocastForward` has put on an instance, and what was there before."""
    attributes = getattr(forward, "__dict__", {})
    return "ddp_mp_own" in attributes, attributes.get("ddp_mp_own")


def other_autocast(kind: str, dtype: torch.dtype) -> torch.dtype | None:
    """The type of an autocast around the caller that differs from ``dtype``, or None."""
    if not torch.is_autocast_enabled(kind):
        return None
    found = torch.get_autocast_dtype(kind)
    return None if found is dtype else found
