"""PyTorch's own mixed-precision hooks on a machine for which they were not written."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def silent_device_events() -> Iterator[None]:
    """Lets PyTorch's own hooks run on a machine without an accelerator.

    They create and record ``torch.Event`` and ask for the accelerator's current stream, and a CPU has neither.  Inside this
    context both are empty objects there, and everything else is PyTorch's own code; so what real events cost is not in any
    time that is measured, which flatters PyTorch's side.  A PyTorch built for CUDA, where there is none, cannot make a stream
    either: there streams are the CPU's, as in a PyTorch built without CUDA.
    """
    if torch.accelerator.is_available():
        yield
        return

    class Event:
        def __init__(self, *_: object, **__: object) -> None: ...
        def record(self, *_: object) -> None: ...
        def wait(self, stream: object = None) -> None: ...

    class Stream:
        def wait_stream(self, _: object) -> None: ...

    saved = torch.Event, torch.Stream, torch.accelerator.current_stream
    torch.Event, torch.Stream = Event, functools.partial(torch.Stream, device="cpu")  # type: ignore
    torch.accelerator.current_stream = lambda *_: Stream()  # type: ignore
    try:
        yield
    finally:
        torch.Event, torch.Stream, torch.accelerator.current_stream = saved  # type: ignore
