"""The simulator from Python: the control surface of ``simcuda.h``."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

HOST = C.c_void_p(2 ** (8 * C.sizeof(C.c_void_p)) - 1)


class Schedule(IntEnum):
    """When queued work runs; see ``simcuda.h``."""

    EAGER = 0
    LAZY = 1
    RANDOM = 2
    THREAD = 3


@dataclass(frozen=True)
class Range:
    """Bytes that an operation of somebody else reads or writes."""

    base: int
    size: int
    write: bool = False


class _CRange(C.Structure):
    _fields_ = (("base", C.c_void_p), ("bytes", C.c_size_t), ("write", C.c_int))


_TEXT, _P, _U64, _INT = C.c_char_p, C.c_void_p, C.c_uint64, C.c_int
_RANGES = C.POINTER(_CRange)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "sim_reset": (None, (_INT, _U64)),
    "sim_begin": (None, (_INT, _U64)),
    "sim_report": (_TEXT, ()),
    "sim_report_count": (_INT, (_TEXT,)),
    "sim_live": (_INT, (_TEXT,)),
    "sim_leaks": (_TEXT, ()),
    "sim_forked_calls": (_U64, ()),
    "sim_calls": (_U64, (_TEXT,)),
    "sim_call_log": (_TEXT, ()),
    "sim_blocking_calls": (_U64, ()),
    "sim_gil_blocks": (_U64, ()),
    "sim_set_gil_probe": (None, (_P,)),
    "sim_executed": (_U64, (_TEXT, _TEXT)),
    "sim_executed_log": (_TEXT, (_TEXT,)),
    "sim_fault": (None, (_TEXT, _U64, _INT, _U64)),
    "sim_fault_kernel": (None, (_U64, _INT)),
    "sim_set_memory_limit": (None, (C.c_size_t,)),
    "sim_delay": (None, (_TEXT, _INT)),
    "sim_set_devices": (None, (_TEXT,)),
    "sim_set_driver_version": (None, (_INT,)),
    "sim_hide": (None, (_TEXT,)),
    "sim_set_host_memory": (None, (_INT,)),
    "sim_register": (None, (_P, C.c_size_t, _TEXT, _INT)),
    "sim_unregister": (None, (_P,)),
    "sim_name_stream": (None, (_P, _TEXT)),
    "sim_work": (_INT, (_P, _RANGES, C.c_size_t, _P, _P, C.c_size_t, _TEXT)),
    "sim_enter": (_INT, (_P,)),
    "sim_access": (_INT, (_P, _RANGES, C.c_size_t, _TEXT)),
    "sim_synchronize": (_INT, (_P,)),
    "sim_set_current_stream": (None, (_P,)),
    "sim_current_stream": (_P, ()),
    "sim_step": (_INT, (_INT,)),
}


def _counts(log: bytes) -> dict[str, int]:
    pairs = (entry.rsplit("=", 1) for entry in log.decode().split())
    return {name: int(count) for name, count in pairs}


class Simulator:
    """The simulated driver of this process.

    Loading it makes every later ``dlopen("libcuda.so.1")`` in the process find it, so it must come before the code
    under test looks for a driver.
    """

    def __init__(self, library: Path) -> None:
        self.path = library
        self.functions = C.CDLL(str(library))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments
        self._kept: dict[int, object] = {}

    # What goes on

    def reset(self, schedule: Schedule = Schedule.EAGER, seed: int = 1) -> None:
        """Forgets everything, live objects too."""
        self.functions.sim_reset(schedule, seed)
        self._kept.clear()

    def begin(self, schedule: Schedule = Schedule.EAGER, seed: int = 1) -> None:
        """Begins a test; live objects stay, findings and counts are cleared."""
        self.functions.sim_begin(schedule, seed)

    def step(self, n: int = 1) -> int:
        return self.functions.sim_step(n)

    # What was wrong

    def report(self) -> list[str]:
        return self.functions.sim_report().decode(errors="replace").splitlines()

    def count(self, kind: str = "*") -> int:
        """How many findings of that kind there are."""
        return self.functions.sim_report_count(kind.encode())

    def live(self, kind: str) -> int:
        return self.functions.sim_live(kind.encode())

    def leaks(self) -> dict[str, int]:
        """What is alive, by kind."""
        return _counts(self.functions.sim_leaks())

    def forked_calls(self) -> int:
        return self.functions.sim_forked_calls()

    # What was done

    def calls(self, function: str = "*") -> int:
        return self.functions.sim_calls(function.encode())

    def call_log(self) -> dict[str, int]:
        return _counts(self.functions.sim_call_log())

    def blocking_calls(self) -> int:
        return self.functions.sim_blocking_calls()

    def probe_gil(self) -> None:
        """From now on `gil_blocks` counts blocking calls that were made with the GIL held."""
        self.functions.sim_set_gil_probe(C.cast(C.pythonapi.PyGILState_Check, _P))

    def gil_blocks(self) -> int:
        return self.functions.sim_gil_blocks()

    def executed(self, kernel: str = "*", mnemonic: str = "*") -> int:
        """How often instructions with that prefix were executed."""
        return self.functions.sim_executed(kernel.encode(), mnemonic.encode())

    def executed_log(self, kernel: str = "*") -> dict[str, int]:
        return _counts(self.functions.sim_executed_log(kernel.encode()))

    # What goes wrong

    def fault(self, function: str, nth: int = 1, code: int = 2, times: int = 1) -> None:
        """The nth call from now of ``function`` ("*": any) returns ``code``; ``times`` calls in a row do."""
        self.functions.sim_fault(function.encode(), nth, code, times)

    def fault_kernel(self, nth: int = 1, code: int = 700) -> None:
        self.functions.sim_fault_kernel(nth, code)

    def limit_memory(self, size: int) -> None:
        self.functions.sim_set_memory_limit(size)

    def delay(self, label_part: str, microseconds: int = 0) -> None:
        """Work whose label contains the text runs as late as its order allows."""
        self.functions.sim_delay(label_part.encode(), microseconds)

    # What the machine is

    def set_devices(self, *capabilities: int) -> None:
        self.functions.sim_set_devices(",".join(map(str, capabilities)).encode())

    def set_driver_version(self, version: int) -> None:
        self.functions.sim_set_driver_version(version)

    def hide(self, *functions: str) -> None:
        self.functions.sim_hide(",".join(functions).encode())

    def set_host_memory(self, is_device_memory: bool) -> None:
        """Whether kernels may touch host memory that nobody registered."""
        self.functions.sim_set_host_memory(is_device_memory)

    # Memory and work of others

    def register(self, base: int, size: int, label: str, device: int = -1, keep: object = None) -> None:
        """Makes host memory device memory; ``keep`` is kept alive until `unregister` or `reset`."""
        self.functions.sim_register(base, size, label.encode(), device)
        self._kept[base] = keep

    def unregister(self, base: int) -> None:
        self.functions.sim_unregister(base)
        self._kept.pop(base, None)

    def name_stream(self, stream: int, name: str) -> None:
        self.functions.sim_name_stream(stream, name.encode())

    def work(self, stream: int | None, ranges: Sequence[Range], label: str, into: int = 0, data: bytes | None = None) -> None:
        """Queues foreign work that touches the ranges and, with ``data``, copies it to ``into``."""
        array, count = self._ranges(ranges)
        code = self.functions.sim_work(stream, array, count, into, data, len(data or b""), label.encode())
        self._accept(code, "sim_work")

    def enter(self, stream: int | None) -> None:
        """The calling thread acts as the stream from here to `access`."""
        self._accept(self.functions.sim_enter(stream), "sim_enter")

    def access(self, stream: int | C.c_void_p | None, ranges: Sequence[Range], label: str) -> None:
        """Books what the calling thread did as the stream's (or `HOST`'s) work."""
        array, count = self._ranges(ranges)
        self._accept(self.functions.sim_access(stream, array, count, label.encode()), "sim_access")

    def synchronize(self, stream: int | C.c_void_p | None = HOST) -> None:
        """The host waits for a stream, or for everything; counted nowhere."""
        self._accept(self.functions.sim_synchronize(stream), "sim_synchronize")

    @property
    def current_stream(self) -> int | None:
        return self.functions.sim_current_stream()

    @current_stream.setter
    def current_stream(self, stream: int | None) -> None:
        self.functions.sim_set_current_stream(stream)

    @staticmethod
    def _ranges(ranges: Sequence[Range]) -> tuple[object, int]:
        return (_CRange * len(ranges))(*((r.base, r.size, int(r.write)) for r in ranges)), len(ranges)

    @staticmethod
    def _accept(code: int, what: str) -> None:
        if code:
            raise ValueError(f"{what} returned {code}: no such stream?")
