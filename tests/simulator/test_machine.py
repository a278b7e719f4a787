"""Devices, old drivers, missing functions, forks, threads."""

from __future__ import annotations

import ctypes as C
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from .build import compiler, library, toolkit
from .driver import Driver, DriverError
from .images import kernel
from .sim import Range, Schedule, Simulator

pytestmark = pytest.mark.long

CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS = 75, 76, 16


# Devices


def test_devices_have_contexts_and_capabilities_of_their_own(sim, cu):
    sim.set_devices(90, 75)
    contexts = [cu.start(0), cu.start(1)]
    assert cu.cuDeviceGetCount() == 2
    assert contexts[0] != contexts[1]
    assert [cu.cuDeviceGetAttribute(CAPABILITY_MAJOR, d) for d in (0, 1)] == [9, 7]
    assert [cu.cuDeviceGetAttribute(CAPABILITY_MINOR, d) for d in (0, 1)] == [0, 5]
    assert cu.code("cuDeviceGet", 2) == 101
    for device in (0, 1):
        cu.cuDevicePrimaryCtxRelease(device)


def test_events_order_streams_of_two_devices(sim, cu):
    sim.set_devices(90, 90)
    cu.start(0)
    a, e = cu.stream(), cu.event()
    cu.start(1)
    b = cu.stream()
    x = np.zeros(4, np.float32)
    sim.register(x.ctypes.data, 16, "x", keep=x)
    ranges = [Range(x.ctypes.data, 16, write=True)]
    sim.work(a, ranges, "device 0")
    cu.cuEventRecord(e, a)
    assert cu.code("cuEventRecord", e, b) == 400  # an event belongs to its device
    cu.cuStreamWaitEvent(b, e, 0)
    sim.work(b, ranges, "device 1")
    cu.cuStreamSynchronize(b)
    assert sim.report() == []
    sim.work(a, ranges, "device 0 again")
    cu.cuStreamSynchronize(a)
    sim.work(a, ranges, "unordered")
    sim.work(b, ranges, "unordered too")
    cu.cuStreamSynchronize(a)
    cu.cuStreamSynchronize(b)
    sim.expect("RACE", "unordered too")
    for handle in (a, b):
        cu.cuStreamDestroy(handle)
    cu.cuEventDestroy(e)
    for device in (0, 1):
        cu.cuDevicePrimaryCtxRelease(device)


def test_kernel_of_one_device_cannot_run_on_another(simulator, cu):
    simulator.reset()
    simulator.set_devices(90, 90)
    cu.start(0)
    _, function = cu.function(kernel(""), "k")
    cu.start(1)
    with pytest.raises(DriverError, match="400"):
        cu.launch(function, cu.stream(), [C.c_uint64(0)])


def test_no_device(simulator, cu):
    simulator.reset()
    simulator.set_devices()
    assert cu.code("cuInit", 0) == 100
    simulator.reset()


# Old drivers


def lookup(cu: Driver, name: str, version: int) -> tuple[bool, int]:
    """Whether cuGetProcAddress finds it, and the status."""
    address, found = C.c_void_p(), C.c_int()
    cu.cuGetProcAddress(name.encode(), C.byref(address), version, 0, C.byref(found))
    return bool(address.value), found.value


def test_functions_are_found_by_version_and_hidden_on_request(simulator, cu):
    simulator.reset()
    assert lookup(cu, "cuLaunchKernel", 4000) == (True, 0)
    assert lookup(cu, "cuMemAlloc", 2000) == (False, 2)  # that ABI is not simulated
    assert lookup(cu, "cuLaunchKernelEx", 12000) == (True, 0)
    assert lookup(cu, "cuMemAlloc_v2", 12000) == (False, 1)  # names have no suffix
    simulator.hide("cuLaunchKernelEx", "cuMemAllocAsync")
    assert lookup(cu, "cuLaunchKernelEx", 12000) == (False, 1)
    simulator.set_driver_version(11050)
    assert lookup(cu, "cuLaunchKernel", 12000) == (True, 0)
    assert lookup(cu, "cuFuncGetParamInfo", 12040) == (False, 1)
    assert cu.cuDriverGetVersion() == 11050
    simulator.reset()


def test_caller_gets_the_abi_it_asks_for(simulator, cu):
    simulator.reset()
    cu.start()
    addresses = set()
    for version in (10010, 11030, 12030):
        address = C.c_void_p()
        cu.cuGetProcAddress(b"cuStreamGetCaptureInfo", C.byref(address), version, 0, None)
        addresses.add(address.value)
        status, ident = C.c_int(7), C.c_uint64()
        extra = {10010: 0, 11030: 3, 12030: 4}[version]
        function = C.CFUNCTYPE(C.c_int, C.c_void_p, C.c_void_p, C.c_void_p, *[C.c_void_p] * extra)(address.value)
        assert function(None, C.addressof(status), C.addressof(ident), *[None] * extra) == 0
        assert status.value == 0
    assert len(addresses) == 3


def run_python(code: str, library_path: Path, **environment: str) -> str:
    """Runs code in a process of its own, with the driver preloaded as a real one would be installed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"SIMCUDA_LIBRARY": str(library_path)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_environment_chooses_the_machine(simulator):
    code = """
import ctypes as C, os
lib = C.CDLL(os.environ["SIMCUDA_LIBRARY"])
n, v, p = C.c_int(), C.c_int(), C.c_void_p()
lib.cuInit(0); lib.cuDeviceGetCount(C.byref(n)); lib.cuDriverGetVersion(C.byref(v))
print(n.value, v.value, lib.cuGetProcAddress(b"cuLaunchKernelEx", C.byref(p), 12000, C.c_uint64(0)))
"""
    settings = {"SIMCUDA_DEVICES": "80,75", "SIMCUDA_DRIVER_VERSION": "12020", "SIMCUDA_HIDE": "cuLaunchKernelEx"}
    assert run_python(code, simulator.path, **settings) == "2 12020 500"


def test_library_without_symbols_lacks_them_for_dlsym_too(simulator):
    old = library(hide=["cuGetProcAddress", "cuGetProcAddress_v2", "cuLaunchKernelEx"])
    code = """
import ctypes as C, os
lib = C.CDLL(os.environ["SIMCUDA_LIBRARY"])
print([hasattr(lib, n) for n in ("cuGetProcAddress", "cuGetProcAddress_v2", "cuLaunchKernelEx", "cuLaunchKernel")])
"""
    assert run_python(code, old) == "[False, False, False, True]"


def test_later_dlopen_by_soname_finds_the_loaded_simulator(simulator):
    code = """
import ctypes as C, os
first = C.CDLL(os.environ["SIMCUDA_LIBRARY"])
second = C.CDLL("libcuda.so.1")
print(first._handle == second._handle, hasattr(second, "sim_reset"))
"""
    assert run_python(code, simulator.path) == "True True"


def test_exports_are_the_driver_and_the_control_surface_alone(simulator):
    listing = subprocess.run(["nm", "-D", "--defined-only", str(simulator.path)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert {n for n in names if not n.startswith(("cu", "sim_"))} == set()


# Forks and threads


@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.THREAD])
def test_call_in_a_forked_child_is_refused_and_counted_for_the_parent(simulator, cu, schedule):
    simulator.reset(schedule)
    cu.start()
    stream = cu.stream()
    child = os.fork()
    if child == 0:
        os._exit(cu.code("cuStreamSynchronize", stream))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert simulator.forked_calls() == 1
    cu.cuStreamSynchronize(stream)


def test_forked_child_of_a_process_that_did_not_initialise_may_start(simulator, cu):
    simulator.reset()
    child = os.fork()
    if child == 0:
        os._exit(cu.code("cuInit", 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_contexts_are_current_per_thread(sim, cu):
    context = cu.start()
    codes = []

    def other() -> None:
        codes.append(cu.code("cuEventCreate", 2))
        cu.cuCtxPushCurrent(context)
        cu.cuEventDestroy(cu.cuEventCreate(2))
        codes.append(cu.cuCtxPopCurrent())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert codes == [201, context]
    cu.cuDevicePrimaryCtxRelease(0)


def test_threads_may_share_the_driver(sim, cu):
    context = cu.start()
    words = np.zeros(8, np.uint32)
    sim.register(words.ctypes.data, 32, "words", keep=words)
    body = "ld.global.u32 %r1, [%d0]; add.u32 %r1, %r1, 1; st.global.u32 [%d0], %r1;"
    module, function = cu.function(kernel(body), "k")

    def work(i: int) -> None:
        cu.cuCtxSetCurrent(context)
        stream = cu.stream()
        for _ in range(25):
            cu.launch(function, stream, [C.c_uint64(words.ctypes.data + 4 * i)])
        cu.cuStreamSynchronize(stream)
        cu.cuStreamDestroy(stream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words.tolist() == [25] * 8
    cu.cuModuleUnload(module)
    cu.cuDevicePrimaryCtxRelease(0)


@pytest.mark.long
@pytest.mark.parametrize("sanitize", ["thread", "address,undefined"])
def test_native_client_is_clean_under_sanitizers(sanitize, tmp_path):
    """A C++ client with threads; the simulator itself is instrumented too."""
    source, program = Path(__file__).parent / "native" / "threads.cpp", tmp_path / "threads"
    flags = [f"-fsanitize={sanitize}", "-std=c++17", "-O1", "-g", "-pthread", f"-I{toolkit() / 'include'}"]
    built = subprocess.run(
        [compiler(), *flags, f"-I{Path(__file__).parent}", str(source), "-ldl", "-o", str(program)],
        capture_output=True,
        text=True,
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no runtime for {sanitize}")
    assert built.returncode == 0, built.stderr
    options = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        ["setarch", os.uname().machine, "-R", str(program), str(library(sanitize))],
        env=environment | options,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("clean")


def test_simulator_is_the_one_of_the_fixtures(simulator):
    assert isinstance(simulator, Simulator)
    assert simulator.path.name == "libcuda.so.1"
