"""PyTorch's CPU allocator on the simulated device: inside `on_device`, new tensors are memory of its caching allocator."""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from .build import torch_allocator
from .sim import Simulator


@functools.cache
def _library(sim: Simulator) -> C.PyDLL:
    """Once a process: tensors refer to their allocator for ever.  With the GIL held, as it is asked at every operation."""
    library = C.PyDLL(str(torch_allocator()))
    take, give = (C.cast(getattr(sim.functions, f"sim_cache_{name}"), C.c_void_p) for name in ("allocate", "free"))
    library.torch_allocator_install(take, give)
    return library


class DeviceMemory:
    """Where the calling thread's tensors are allocated."""

    def __init__(self, sim: Simulator) -> None:
        self._library = _library(sim)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside, the thread's current stream owns new memory."""
        before = self._library.torch_allocator_on_device(1)
        try:
            yield
        finally:
            self._library.torch_allocator_on_device(before)
