"""Which stream the CUDA side of events and functions works on and waits with, on the simulated driver.

Tensors are objects that claim to be CUDA's through an exchange table of our own, over registered host memory.  Every
scenario is a process of its own, since a device once open stays open.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NUMEL = 4096


class Machine:
    """The simulator, two streams of a caller, and tensors on the device.  ``current`` is what the table reports."""

    def __init__(self) -> None:
        # Here and not above: the test that starts the process needs neither.
        from kit.dlpack import BFLOAT, CUDA, CURRENT_STREAM, FLOAT, TENSOR_FROM_OBJECT, Table, Version, integers, table_type
        from simulator.build import library
        from simulator.driver import Driver
        from simulator.sim import Schedule, Simulator

        self.sim = Simulator(library())
        self.sim.reset(Schedule.LAZY)
        self.driver = Driver(self.sim.functions)
        self.driver.start()
        self.one, self.other = self.driver.stream(), self.driver.stream()
        self.current = self.one
        shape = integers((NUMEL,))

        @TENSOR_FROM_OBJECT
        def describe(tensor: Any, out: Any) -> int:
            out[0].data, out[0].device_type, out[0].device_index = tensor.address, CUDA, 0
            out[0].ndim, out[0].shape, out[0].strides, out[0].byte_offset = 1, shape, None, 0
            out[0].code, out[0].bits, out[0].lanes = (BFLOAT, 16, 1) if tensor.low else (FLOAT, 32, 1)
            return 0

        @CURRENT_STREAM
        def current(_type: int, _index: int, out: Any) -> int:
            out[0] = self.current
            return 0

        self._kept = shape, describe, current
        self._type = table_type(
            Table(version=Version(1, 3), tensor_from_object=describe, current_stream=current), keep=self._kept
        )

    def tensor(self, label: str, low: bool = False) -> Any:
        size = NUMEL * (2 if low else 4)
        memory = (ctypes.c_char * (size + 256))()
        tensor = self._type()
        tensor.address, tensor.low, tensor.data = (ctypes.addressof(memory) + 255) & ~255, low, None
        self.sim.register(tensor.address, size, label, keep=memory)
        return tensor

    def touch(self, stream: int, tensor: Any, write: bool = False) -> None:
        """Work of the caller on its stream."""
        from simulator.sim import Range

        self.sim.work(stream, [Range(tensor.address, NUMEL * (2 if tensor.low else 4), write)], "caller")

    def races(self) -> int:
        self.sim.synchronize()
        return sum("RACE" in line.upper() for line in self.sim.report())

    def recorded(self) -> tuple[Any, Any]:
        """An event behind a cast that has not run yet, and the tensor that it writes."""
        from ddp_mp import _C

        master, low = self.tensor("master"), self.tensor("low", low=True)
        engine = _C.Engine([master], ["weight"], [({"weight": master}, "weight", 0)], "bfloat16", 1 << 20, 1 << 20)
        engine.bind([master], [low], None)
        engine.cast()
        self.kept_engine = engine
        return engine.event(0), low


class CudaStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class TorchStream:
    stream_id = 3

    def __init__(self, handle: int) -> None:
        self.native_handle = handle


def waits_with(make: Callable[[int], Any]) -> Callable[[Machine], None]:
    """The stream given is the one that waits, and only that one."""

    def scenario(machine: Machine) -> None:
        event, low = machine.recorded()
        event.wait(make(machine.other))
        machine.touch(machine.other, low)
        assert machine.races() == 0
        event, low = machine.recorded()
        event.wait(stream=make(machine.other))
        machine.touch(machine.one, low)
        assert machine.races() > 0

    return scenario


def none_is_the_current_stream_of_that_moment(machine: Machine) -> None:
    event, low = machine.recorded()
    machine.current = machine.other
    event.wait()
    event.wait(None)
    machine.touch(machine.other, low)
    assert machine.races() == 0
    event, low = machine.recorded()
    event.wait()
    machine.touch(machine.one, low)
    assert machine.races() > 0


def what_is_no_stream_is_refused(machine: Machine) -> None:
    class Failing:
        @property
        def cuda_stream(self) -> int:
            raise KeyError("mine")

    event, _ = machine.recorded()
    waits = machine.sim.calls("cuStreamWaitEvent")
    for stream, error in (
        ("text", TypeError),
        (1.5, TypeError),
        (object(), TypeError),
        (2**70, OverflowError),
        (CudaStream("x"), TypeError),  # type: ignore[arg-type]
        (Failing(), KeyError),
    ):
        with pytest.raises(error):
            event.wait(stream)
    assert machine.sim.calls("cuStreamWaitEvent") == waits


def an_event_waited_for_never_blocks_or_queries(machine: Machine) -> None:
    event, _ = machine.recorded()
    before = machine.sim.blocking_calls(), machine.sim.calls("cuEventQuery")
    event.wait()
    assert (machine.sim.blocking_calls(), machine.sim.calls("cuEventQuery")) == before
    assert event.query() is False
    event.synchronize()
    assert event.query() is True
    assert machine.races() == 0


def waiting_on_the_device_gives_up_the_gil(machine: Machine) -> None:
    machine.sim.probe_gil()
    event, _ = machine.recorded()
    event.synchronize()
    assert machine.sim.blocking_calls() > 0
    assert machine.sim.gil_blocks() == 0


def functions_work_on_the_current_stream(machine: Machine) -> None:
    from ddp_mp import _C

    src, dst = machine.tensor("src"), machine.tensor("dst", low=True)
    machine.touch(machine.one, src, write=True)
    _C.cast(src, dst)
    machine.touch(machine.one, dst)
    assert _C.current_stream(src) == machine.one
    assert machine.races() == 0
    machine.touch(machine.other, src, write=True)
    _C.cast(src, dst)
    assert machine.races() > 0


def fuse_on_the_private_stream_is_ordered_both_ways(machine: Machine) -> None:
    from ddp_mp import _C

    src, dst = machine.tensor("src"), machine.tensor("dst", low=True)
    for _ in range(3):
        machine.touch(machine.one, src, write=True)
        _C.fuse([src], [None], [dst], 2.0, private=True)
        machine.touch(machine.one, dst)
        machine.touch(machine.one, src, write=True)
    assert machine.races() == 0


SCENARIOS: dict[str, Callable[[Machine], None]] = {
    "wait: torch.cuda.Stream": waits_with(CudaStream),
    "wait: torch.Stream": waits_with(TorchStream),
    "wait: handle": waits_with(int),
    "wait: None": none_is_the_current_stream_of_that_moment,
    "wait: no stream": what_is_no_stream_is_refused,
    "wait: blocks nothing": an_event_waited_for_never_blocks_or_queries,
    "synchronize: without the GIL": waiting_on_the_device_gives_up_the_gil,
    "cast: current stream": functions_work_on_the_current_stream,
    "fuse: private stream": fuse_on_the_private_stream_is_ordered_both_ways,
}


def run(name: str) -> None:
    machine = Machine()
    SCENARIOS[name](machine)
    machine.sim.synchronize()  # before the memory goes that work still uses


@pytest.mark.parametrize("name", SCENARIOS)
def test_streams_on_the_simulated_device(name: str, tmp_path: Path) -> None:
    from simulator.build import UnavailableError, library

    from ddp_mp import _C

    if not _C.build_info()["cuda_image"]["size"]:
        pytest.skip(f"no kernel image: {_C.build_info()['cuda_image']['note']}")
    try:
        library()
    except UnavailableError as error:
        pytest.skip(f"the simulated driver cannot be built: {error}")
    # The package in name only: its own imports, of PyTorch above all, would take most of the time.
    program = (
        "import sys, types\n"
        "sys.modules['ddp_mp'] = types.ModuleType('ddp_mp')\n"
        f"sys.modules['ddp_mp'].__path__ = [{str(Path(_C.__file__).parent)!r}]\n"
        "import test_cuda_streams as t\n"
        f"t.run({name!r})\n"
    )
    paths = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,  # which comes first on the path of `python -c`
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
