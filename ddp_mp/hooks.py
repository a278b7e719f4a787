"""How hooks of ours are made: held weakly, left alone by torch.compile, shown in traces; and who has called them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.profiler import record_function

#: Whether a profiler records.
profiling: Callable[[], bool] = torch.autograd._profiler_enabled

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R], otherwise: R) -> Callable[P, R]:
    """A callable that calls the bound method, or returns ``otherwise`` once the method's object is gone.

    Hooks that PyTorch, a module or a parameter keeps are made so: a patched model goes with its wrapper.
    """
    bound: Any = method
    owner, function = weakref.ref(bound.__self__), bound.__func__  # WeakMethod binds anew at each call: 2 us in training

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = owner()
        return otherwise if alive is None else function(alive, *args, **kwargs)

    return call


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, left alone by torch.compile.

    Dynamo meets a hook in two ways.  Where it traces the caller, it must be told to break its graph, which its own decorator
    does; that takes some 10 us in a training step, compiled or not, so it is called only where something is being traced.
    After such a break the hook runs as an ordinary frame, which Dynamo would trace too: its code is marked as not to be.
    """
    decorated = torch._disable_dynamo(hook)

    def call(*args: Any) -> Any:
        return decorated(*args) if is_compiling() else hook(*args)

    leave_alone(call.__code__)
    return call


def leave_alone(code: Any) -> None:
    """Frames of this code, and all that they call, run as they are."""
    frames = torch._C._dynamo.eval_frame
    mark = getattr(frames, "set_code_exec_strategy", None)
    if mark is not None:
        skip = frames._FrameAction.SKIP
        mark(code, frames._FrameExecStrategy(skip, skip))


# --- traces ------------------------------------------------------------------------------------------------------------------


def in_range(name: str, function: Callable[P, R]) -> Callable[P, R]:
    """The function in a range of the trace, for where a profiler is known to run: ``record_function`` takes 10 us without one.

    The names are ``ddp_mp::cast``, ``::wait``, ``::reduce``, ``::finish`` and ``::restore``.  They are host time: on CUDA the
    kernels below them are the device's side, which the profiler links to them.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with record_function(name):
            return function(*args, **kwargs)

    return call


# --- callers -----------------------------------------------------------------------------------------------------------------


def callers() -> Iterator[FrameType]:
    """The frame that asks and those below it, innermost first.  Not for what runs in every step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_called(module: nn.Module) -> bool:
    """Whether a call of the module is under way in this thread."""
    calls = (frame for frame in callers() if frame.f_code.co_name == "_call_impl")
    return any(frame.f_locals.get("self") is module for frame in calls)
