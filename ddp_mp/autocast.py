"""``Options.autocast``: a module's forward runs in autocast of ``param_dtype``, whoever calls it.

The forward itself is replaced on the instance, so that no exception and no interrupt leaves autocast behind, and so that
torch.compile sees an ordinary context manager.
"""

from __future__ import annotations

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
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not region.low:
                return original(*args, **kwargs)
            with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                return original(*args, **kwargs)

        def refuse_clone(called: nn.Module, args: Any) -> None:
            # a copy of __dict__ takes the hooks along too
            if called is not module:
                raise RuntimeError(
                    "ddp_mp: a shallow clone of a module that is patched with Options.autocast was called; its forward is that "
                    "of the original, and would compute with the original's parameters: clone copy.copy(module), which has a "
                    "forward of its own"
                )

        forward.__dict__["ddp_mp_own"] = self._own
        module.__dict__["forward"] = self._forward = forward
        self._handle = module.register_forward_pre_hook(refuse_clone)

    @property
    def hook_id(self) -> int:
        """Key of the hook in the module's hook dictionaries."""
        return self._handle.id

    def remove(self) -> None:
        """The module's own forward again.  One that somebody has put around ours stays, and passes everything through."""
        self._handle.remove()
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
