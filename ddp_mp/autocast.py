"""``Options.autocast``: a module's forward runs in autocast of ``param_dtype``, whoever calls it.

The forward itself is replaced on the instance, so that no exception and no interrupt leaves autocast behind, and so that
torch.compile sees an ordinary context manager.  Where somebody else's function stands on the instance when the wrapper is
called, as PyTorch Lightning puts one there for each step, the wrapper's call runs in autocast instead.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .step import Region

#: The types that autocast computes in on every device.
LOW = (torch.bfloat16, torch.float16)

_BELOW = "ddp_mp_below"  # attribute of our forwards


class _Below:
    """What a forward of ours calls, and the forward that was on the instance before it, as some libraries put one there."""

    def __init__(self, module: nn.Module) -> None:
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")
        self.call: Callable[..., Any] = module.forward


class AutocastForward:
    """The forward of one module, inside autocast or, where ``dtype`` is None, outside of it.

    The module is held weakly: a graph keeps the plan that owns this object, and a module may keep an output.

    Args:
        module: its instance gets a ``forward`` of its own until :meth:`remove`.
        dtype: the type of autocast; None: autocast is off inside.
        region: says whether the patched model computes in low precision now; outside of that nothing is changed.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, region: Region) -> None:
        kind, below = device_type(module), _Below(module)
        self._autocast = autocast = functools.partial(torch.autocast, kind, dtype=dtype, enabled=dtype is not None)

        @functools.wraps(below.call, updated=())  # frameworks ask for its signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not region.low:
                return below.call(*args, **kwargs)
            with autocast():
                return below.call(*args, **kwargs)

        def refuse_clone(called: nn.Module, args: Any) -> None:
            # a copy of __dict__ takes the hooks along too
            if called is not module:
                raise RuntimeError(
                    "ddp_mp: a shallow clone of a module that is patched with Options.autocast was called; its forward is that "
                    "of the original, and would compute with the original's parameters: clone copy.copy(module), which has a "
                    "forward of its own"
                )

        forward.__dict__[_BELOW] = below
        module.__dict__["forward"] = forward
        self._module, self._forward = weakref.ref(module), weakref.ref(forward)
        self._handle = module.register_forward_pre_hook(refuse_clone)

    def around_call(self) -> contextlib.AbstractContextManager[Any]:
        """What a call of the module by its wrapper is to run in: autocast, unless our forward is in place and does the same."""
        module = self._module()
        ours, _ = own_forward(None if module is None else module.__dict__.get("forward"))
        return contextlib.nullcontext() if ours else self._autocast()

    def remove(self) -> None:
        """The module has the forward that it had.  Below one that somebody else has put around it, ours passes all through."""
        self._handle.remove()
        module, ours = self._module(), self._forward()
        if module is None or ours is None:
            return
        upper: _Below | None = None
        present = module.__dict__.get("forward")
        while present is not ours:
            upper = _below(present)  # that of another patched model, which is around ours
            if upper is None:
                return
            present = upper.own
        mine = _below(ours)
        assert mine is not None
        if upper is not None:
            upper.own, upper.call = mine.own, mine.call
        elif mine.own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = mine.own


def _below(forward: Any) -> _Below | None:
    """What lies below a forward of ours; None for any other."""
    found = getattr(forward, "__dict__", {}).get(_BELOW)
    return found if isinstance(found, _Below) else None


def own_forward(forward: Any) -> tuple[bool, Callable[..., Any] | None]:
    """Whether this is a forward that :class:`AutocastForward` has put on an instance, and what was there before all of ours."""
    below = _below(forward)
    if below is None:
        return False, None
    while (lower := _below(below.own)) is not None:
        below = lower
    return True, below.own


def device_type(module: nn.Module) -> str:
    """The type of device that autocast is asked for: the accelerator's, where a module has anything on one."""
    kinds = {p.device.type for p in module.parameters()} | {b.device.type for b in module.buffers()}
    return next(iter(kinds - {"cpu"}), "cpu")
