"""Who has called: frames of this thread.  Not for what runs in every step, where a generator costs 2 us."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frame that asks and those below it, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
