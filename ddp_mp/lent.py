"""Tensors that the process group's threads still hold, and the interpreter's end, which waits for them.

A collective is over for its caller before the thread that ran it has let go of its tensors and of the context of the backward
that it was started in.  Letting go of them takes Python: a thread that comes to it when Python has ended aborts the process.
"""

from __future__ import annotations

import atexit
import time
import weakref
from os import register_at_fork

import torch

_LONGEST = 1.0  # seconds; where another rank has died, a collective may never be over
_lent: set[weakref.ref[torch.Tensor]] = set()


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as a collective should be given it: another tensor of the same memory, which goes with the collective."""
    alias = tensor.detach()
    _lent.add(weakref.ref(alias, _lent.discard))
    return alias


@atexit.register
def _await_return() -> None:
    deadline = time.monotonic() + _LONGEST
    while _lent and time.monotonic() < deadline:
        time.sleep(0.001)  # which also lets those threads have Python


register_at_fork(after_in_child=_lent.clear)  # a child has none of the threads
