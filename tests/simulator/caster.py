"""A small client of the driver that casts as the extension does, for the simulator's own tests.

A private stream, a pinned descriptor table copied before the launch, an event for the caller.  Each wait can be left out:
the tests want to see that found.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence

import numpy as np

from .driver import Driver
from .images import sample


class Caster:
    """Casts float32 arrays to bfloat16 bits on its own stream."""

    def __init__(self, cu: Driver, *, waits_for_caller: bool = True, waits_before_rewrite: bool = True) -> None:
        self._cu = cu
        self._undo: list[tuple[str, object]] = []
        self._waits_for_caller = waits_for_caller
        self._waits_before_rewrite = waits_before_rewrite
        self._copied = False
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _make(self, undo: str, call: str, *arguments: object) -> int:
        handle = getattr(self._cu, call)(*arguments)
        self._undo.append((undo, handle))
        return handle

    def _open(self) -> None:
        cu = self._cu
        cu.cuInit(0)
        context = cu.cuDevicePrimaryCtxRetain(0)
        self._undo.append(("cuDevicePrimaryCtxRelease", 0))
        cu.cuCtxSetCurrent(context)
        self.stream = self._make("cuStreamDestroy", "cuStreamCreateWithPriority", 1, -5)
        module = self._make("cuModuleUnload", "cuModuleLoadData", sample())
        self._function = cu.cuModuleGetFunction(module, b"cast_f32_bf16")
        self.ready = self._make("cuEventDestroy", "cuEventCreate", 2)
        self._caller = self._make("cuEventDestroy", "cuEventCreate", 2)
        self._table_bytes = 64 * 24
        self._pinned = self._make("cuMemFreeHost", "cuMemHostAlloc", self._table_bytes, 0)
        self._table = self._make("cuMemFree", "cuMemAlloc", self._table_bytes)

    def cast(self, sources: Sequence[tuple[int, int]], targets: Sequence[int], caller: int | None) -> None:
        """Casts (address, elements) to addresses, after the caller's work; `ready` is recorded behind it."""
        cu = self._cu
        if self._copied and self._waits_before_rewrite:
            cu.cuEventSynchronize(self.ready)
        rows = np.array([[s, t, n] for (s, n), t in zip(sources, targets, strict=True)], np.uint64)
        C.memmove(self._pinned, rows.ctypes.data, rows.nbytes)
        if self._waits_for_caller:
            cu.cuEventRecord(self._caller, caller)
            cu.cuStreamWaitEvent(self.stream, self._caller, 0)
        cu.cuMemcpyHtoDAsync(self._table, self._pinned, rows.nbytes, self.stream)
        self._copied = True
        cu.launch(self._function, self.stream, [C.c_uint64(self._table), C.c_int(len(rows))], grid=3, block=64)
        cu.cuEventRecord(self.ready, self.stream)

    def close(self) -> None:
        """Gives everything back, whatever state it is in."""
        if hasattr(self, "stream"):
            self._cu.code("cuStreamSynchronize", self.stream)
        while self._undo:
            function, handle = self._undo.pop()
            self._cu.code(function, handle)
