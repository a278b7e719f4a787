"""Hooks that torch.compile does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, left alone by torch.compile.

    Dynamo meets a hook in two ways.  Where it traces the caller, it must be told to break its graph, which its own decorator
    does; that takes some 10 us in a training step, compiled or not, so it is called only where something is being traced.
    After such a break the hook runs as an ordinary frame, which Dynamo would trace too: its code is marked as not to be.
    """
    decorated = torch._disable_dynamo(hook)

    def call(*args: Any) -> Any:
        return decorated(*args) if is_compiling() else hook(*args)

    _leave_alone(call.__code__)
    return call


def _leave_alone(code: Any) -> None:
    """Frames of this code, and all that they call, run as they are.  A version without the mark traces them as far as the
    decorated call, which is right too but makes Dynamo warn of the outputs' ``.grad``, which it reads."""
    frames = torch._C._dynamo.eval_frame
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:
        skip = frames._FrameAction.SKIP
        mark(code, frames._FrameExecStrategy(skip, skip))
