"""Injected failures: every call once, kernels, sticky errors; and what is counted."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest

from .caster import Caster
from .driver import DriverError
from .images import kernel
from .sim import Schedule

pytestmark = pytest.mark.long


def cast_once(simulator, cu) -> None:
    master, copy = np.ones(2000, np.float32), np.zeros(2000, np.uint16)
    for name, array in (("master", master), ("copy", copy)):
        simulator.register(array.ctypes.data, array.nbytes, name, keep=array)
    caster = Caster(cu)
    try:
        for _ in range(2):
            caster.cast([(master.ctypes.data, 2000)], [copy.ctypes.data], None)
        cu.cuEventSynchronize(caster.ready)
        assert (copy == 0x3F80).all()
    finally:
        caster.close()


@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.LAZY])
def test_sweep_fails_every_call_once_and_nothing_is_swallowed_or_leaked(simulator, cu, schedule):
    simulator.reset(schedule)
    cast_once(simulator, cu)
    setup = {name: n for name, n in simulator.call_log().items() if "Destroy" not in name and "Free" not in name}
    for name in ("cuModuleUnload", "cuDevicePrimaryCtxRelease", "cuStreamSynchronize"):  # close() ignores their errors
        setup.pop(name)
    swept = 0
    for name, calls in setup.items():
        for nth in range(1, calls + 1):
            simulator.reset(schedule)
            simulator.fault(name, nth)
            with pytest.raises(DriverError) as raised:
                cast_once(simulator, cu)
            assert (raised.value.function, raised.value.code) == (name, 2)
            assert simulator.leaks() == {}, (name, nth)
            swept += 1
    assert swept > 20


def test_fault_of_any_function_counts_all_calls(simulator, cu):
    simulator.reset()
    simulator.fault("*", nth=3, code=46)
    with pytest.raises(DriverError, match="cuCtxSetCurrent returned 46"):  # after cuInit and cuDevicePrimaryCtxRetain
        cu.start()


def test_fault_may_last(simulator, cu):
    simulator.reset()
    cu.start()
    simulator.fault("cuEventCreate", nth=2, code=2, times=2)
    assert [cu.code("cuEventCreate", 2) for _ in range(4)] == [0, 2, 2, 0]


@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.LAZY, Schedule.THREAD])
def test_failing_kernel_is_told_later_and_for_good(simulator, cu, schedule):
    simulator.reset(schedule)
    cu.start()
    stream, event, memory = cu.stream(), cu.event(), cu.cuMemAlloc(64)
    _, function = cu.function(kernel("st.global.u32 [%d0], %r1;"), "k")
    simulator.fault_kernel(2, 719)
    cu.launch(function, stream, [C.c_uint64(memory)])
    cu.launch(function, stream, [C.c_uint64(memory)])
    assert cu.code("cuStreamSynchronize", stream) == 719
    assert cu.code("cuEventRecord", event, stream) == 719
    assert cu.code("cuMemAlloc", 4) == 719
    assert [cu.code("cuEventDestroy", event), cu.code("cuMemFree", memory), cu.code("cuStreamDestroy", stream)] == [0, 0, 0]
    assert "injected fault in k" in simulator.report()[0]
    simulator.begin()  # the simulator can heal; a device cannot
    cu.cuEventCreate(2)


def test_dead_context_runs_nothing_more(simulator, cu):
    simulator.reset(Schedule.LAZY)
    cu.start()
    stream = cu.stream()
    done = np.zeros(1, np.int32)
    simulator.register(done.ctypes.data, 4, "done", keep=done)
    _, function = cu.function(kernel("trap;"), "k")
    cu.launch(function, stream, [C.c_uint64(0)])
    simulator.work(stream, [], "later", done.ctypes.data, np.ones(1, np.int32).tobytes())
    assert cu.code("cuStreamSynchronize", stream) == 719
    assert done[0] == 0


@pytest.mark.parametrize(
    ("shape", "code"),
    [({"block": 1025}, 1), ({"grid": 0}, 1), ({"block": 0}, 1), ({"shared": 49153}, 1), ({"grid": 3, "block": 1024}, 0)],
)
def test_impossible_launch_is_refused(simulator, cu, shape, code):
    simulator.reset()
    cu.start()
    _, function = cu.function(kernel(""), "k")
    try:
        cu.launch(function, None, [C.c_uint64(0)], **shape)
        result = 0
    except DriverError as error:
        result = error.code
    assert result == code


def test_launch_beyond_the_kernels_bound_is_out_of_resources(simulator, cu):
    simulator.reset()
    cu.start()
    image = kernel("").replace(b"k(.param .u64 p)", b"k(.param .u64 p) .maxntid 64, 1, 1")
    _, function = cu.function(image, "k")
    cu.launch(function, None, [C.c_uint64(0)], block=64)
    with pytest.raises(DriverError, match="701"):
        cu.launch(function, None, [C.c_uint64(0)], block=65)


# Misuse


def test_dead_handles_are_misuse(simulator, cu):
    simulator.reset()
    cu.start()
    stream, event = cu.stream(), cu.event()
    module, function = cu.function(kernel(""), "k")
    cu.cuStreamDestroy(stream)
    cu.cuEventDestroy(event)
    cu.cuModuleUnload(module)
    assert cu.code("cuStreamSynchronize", stream) == 400
    assert cu.code("cuEventRecord", event, None) == 400
    assert cu.code("cuStreamDestroy", stream) == 400
    assert cu.code("cuModuleUnload", module) == 400
    with pytest.raises(DriverError, match="400"):
        cu.launch(function, None, [C.c_uint64(0)])
    assert simulator.count("MISUSE") == 5


def test_calls_without_init_or_context_are_refused(simulator, cu):
    simulator.reset()
    assert cu.code("cuDeviceGetCount") == 3
    cu.cuInit(0)
    assert cu.code("cuEventCreate", 2) == 201
    cu.start()
    cu.cuDevicePrimaryCtxRelease(0)
    cu.cuCtxPopCurrent()
    context = cu.cuDevicePrimaryCtxRetain(0)
    cu.cuDevicePrimaryCtxRelease(0)
    cu.cuCtxPushCurrent(context)
    assert cu.code("cuEventCreate", 2) == 709
    assert "released" in simulator.report()[0]
    cu.cuCtxPopCurrent()


# Counts


def test_calls_and_blocking_calls_are_counted(simulator, cu):
    simulator.reset()
    cu.start()
    stream, event = cu.stream(), cu.event()
    for _ in range(3):
        cu.cuEventRecord(event, stream)
    cu.cuEventQuery(event)
    assert simulator.calls("cuEventRecord") == 3
    assert simulator.blocking_calls() == 0
    cu.cuEventSynchronize(event)
    cu.cuStreamSynchronize(stream)
    assert simulator.blocking_calls() == 2
    assert simulator.calls() == sum(simulator.call_log().values()) == 11


def test_gil_probe_tells_calls_that_keep_the_gil(simulator, cu):
    simulator.reset()
    cu.start()
    simulator.probe_gil()
    cu.cuCtxSynchronize()  # CDLL gives the GIL up
    assert (simulator.blocking_calls(), simulator.gil_blocks()) == (1, 0)
    assert C.PyDLL(str(simulator.path)).cuCtxSynchronize() == 0
    assert (simulator.blocking_calls(), simulator.gil_blocks()) == (2, 1)


def test_executed_instructions_are_counted_by_mnemonic(simulator, cu):
    simulator.reset()
    cu.start()
    memory = cu.cuMemAlloc(64)
    body = "mov.u32 %r1, %tid.x; setp.eq.u32 %p0, %r1, 0; @%p0 st.global.v2.u32 [%d0], {%r1, %r1};"
    _, function = cu.function(kernel(body), "k")
    cu.launch(function, None, [C.c_uint64(memory)], block=8)
    cu.cuStreamSynchronize(None)
    expected = {"ld.param.u64": 8, "mov.u32": 8, "setp.eq.u32": 8, "st.global.v2.u32": 1, "ret": 8}
    assert simulator.executed_log("k") == expected
    assert simulator.executed("k", "st.global") == 1
    assert simulator.executed() == 33
