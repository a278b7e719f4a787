"""Who has called: frames of this thread.  Not for what runs in every step, where a generator costs 2 us."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch import nn


def callers() -> Iterator[FrameType]:
    """The frame that asks and those below it, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_called(module: nn.Module) -> bool:
    """Whether a call of the module is under way in this thread."""
    calls = (frame for frame in callers() if frame.f_code.co_name == "_call_impl")
    return any(frame.f_locals.get("self") is module for frame in calls)
