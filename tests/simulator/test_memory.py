"""Lifetime, bounds, limits and leaks."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest

from .driver import DriverError
from .images import kernel
from .sim import Range, Schedule

pytestmark = pytest.mark.long


@pytest.fixture
def stream(sim, cu):
    cu.start()
    handle = cu.stream()
    yield handle
    cu.code("cuStreamDestroy", handle)
    cu.cuDevicePrimaryCtxRelease(0)


def touch(base: int, size: int = 256, write: bool = False) -> list[Range]:
    return [Range(base, size, write)]


def test_allocations_are_aligned_and_filled_with_a_pattern(sim, cu, stream):
    memory = [cu.cuMemAlloc(n) for n in (1, 100, 4096)]
    assert all(m % 256 == 0 for m in memory)
    out = np.zeros(100, np.uint8)
    cu.cuMemcpyDtoHAsync(out.ctypes.data, memory[1], 100, stream)
    assert (out == 0xA5).all()
    for m in memory:
        cu.cuMemFree(m)


def test_free_under_pending_work_is_a_race(sim, cu, stream):
    memory = cu.cuMemAlloc(256)
    sim.work(stream, touch(memory), "reader")
    cu.cuMemFree(memory)
    cu.cuStreamSynchronize(stream)
    assert "cuMemFree" in sim.expect("RACE", "reader")


def test_free_after_a_wait_is_fine(sim, cu, stream):
    memory = cu.cuMemAlloc(256)
    sim.work(stream, touch(memory, write=True), "writer")
    cu.cuStreamSynchronize(stream)
    cu.cuMemFree(memory)


def test_use_after_free_is_found(sim, cu, stream):
    memory = cu.cuMemAlloc(256)
    cu.cuMemFree(memory)
    sim.work(stream, touch(memory), "late reader")
    cu.cuStreamSynchronize(stream)
    assert "freed by cuMemFree" in sim.expect("USE-AFTER-FREE", "late reader")


def test_kernel_on_freed_memory_faults(simulator, cu):
    simulator.reset(Schedule.EAGER)
    cu.start()
    memory = cu.cuMemAlloc(256)
    cu.cuMemFree(memory)
    _, function = cu.function(kernel("ld.global.u32 %r1, [%d0];"), "k")
    cu.launch(function, None, [C.c_uint64(memory)])
    assert cu.code("cuStreamSynchronize", None) == 700
    assert "freed device memory" in simulator.report()[0]


def test_stream_ordered_free_is_ordered_on_its_stream_only(sim, cu, stream):
    other = cu.stream()
    good, bad = cu.cuMemAllocAsync(256, stream), cu.cuMemAllocAsync(256, stream)
    sim.work(stream, touch(good, write=True), "writer on the same stream")
    cu.cuMemFreeAsync(good, stream)
    cu.cuCtxSynchronize()
    assert sim.report() == []
    sim.work(other, touch(bad), "reader on another stream")
    cu.cuMemFreeAsync(bad, stream)
    cu.cuCtxSynchronize()
    cu.cuStreamDestroy(other)
    sim.expect("RACE", "reader on another stream", "cuMemFreeAsync")


def test_stream_ordered_memory_is_not_there_for_other_streams(sim, cu, stream):
    other = cu.stream()
    memory = cu.cuMemAllocAsync(256, stream)
    sim.work(other, touch(memory, write=True), "early writer")
    cu.cuCtxSynchronize()
    cu.cuMemFree(memory)
    cu.cuStreamDestroy(other)
    sim.expect("RACE", "cuMemAllocAsync", "early writer")


@pytest.mark.parametrize("free", ["cuMemFree", "cuMemFreeHost"])
def test_free_of_what_is_not_live_is_misuse(sim, cu, stream, free):
    memory = cu.cuMemAlloc(256) if free == "cuMemFree" else cu.cuMemHostAlloc(256, 0)
    getattr(cu, free)(memory)
    assert cu.code(free, memory) == 1
    assert cu.code(free, memory + 8) == 1
    sim.expect("MISUSE", free)


def test_copy_beyond_an_allocation_is_refused(sim, cu, stream):
    memory = cu.cuMemAlloc(256)
    source = np.zeros(512, np.uint8)
    assert cu.code("cuMemcpyHtoDAsync", memory, source.ctypes.data, 257, stream) == 1
    assert cu.code("cuMemcpyHtoDAsync", memory + 128, source.ctypes.data, 128, stream) == 0
    cu.cuStreamSynchronize(stream)
    cu.cuMemFree(memory)


def test_foreign_work_beyond_a_range_is_reported(sim, cu, stream):
    array = np.zeros(64, np.uint8)
    sim.register(array.ctypes.data, 48, "array", keep=array)
    sim.work(stream, touch(array.ctypes.data, 64), "reader")
    cu.cuStreamSynchronize(stream)
    assert "16 bytes past array" in sim.expect("OUT-OF-BOUNDS", "reader")


def test_pageable_source_is_taken_at_the_call(sim, cu, stream):
    memory = cu.cuMemAlloc(64)
    source, target = np.full(16, 7, np.int32), np.zeros(16, np.int32)
    cu.cuMemcpyHtoDAsync(memory, source.ctypes.data, 64, stream)
    source[:] = 9
    cu.cuMemcpyDtoHAsync(target.ctypes.data, memory, 64, stream)
    assert (target == 7).all()
    cu.cuMemFree(memory)


def test_copy_to_pinned_memory_needs_a_wait(sim, cu, stream):
    memory, pinned = cu.cuMemAlloc(64), cu.cuMemHostAlloc(64, 0)
    cu.cuMemsetD32Async(memory, 5, 16, stream)
    cu.cuMemcpyDtoHAsync(pinned, memory, 64, stream)
    cu.cuStreamSynchronize(stream)
    assert list((C.c_int * 16).from_address(pinned)) == [5] * 16
    cu.cuMemFree(memory)
    cu.cuMemFreeHost(pinned)


def test_memory_limit(sim, cu, stream):
    sim.limit_memory(1000)
    first = cu.cuMemAlloc(600)
    with pytest.raises(DriverError, match="cuMemAlloc returned 2"):
        cu.cuMemAlloc(600)
    cu.cuMemFree(first)
    cu.cuMemFree(cu.cuMemAlloc(600))


def test_host_memory_may_be_device_memory(simulator, cu):
    simulator.reset(Schedule.LAZY)
    simulator.set_host_memory(True)
    cu.start()
    streams = [cu.stream(), cu.stream()]
    array = np.zeros(1 << 16, np.uint32)  # larger than an implicit range
    _, function = cu.function(kernel("mov.u32 %r1, 6; st.global.u32 [%d0], %r1;"), "k")
    for stream in streams:
        cu.launch(function, stream, [C.c_uint64(array.ctypes.data + 4096)])
    for stream in streams:
        cu.cuStreamSynchronize(stream)
    assert array[1024] == 6
    assert simulator.count("RACE") == 1
    simulator.begin(Schedule.LAZY)
    simulator.work(streams[0], touch(array.ctypes.data, array.nbytes), "reader of all")
    cu.cuStreamSynchronize(streams[0])
    assert simulator.report() == []
    simulator.set_host_memory(False)


def test_memory_of_another_device_is_out_of_reach(simulator, cu):
    simulator.reset(Schedule.EAGER)
    simulator.set_devices(90, 90)
    cu.start(1)
    theirs = cu.cuMemAlloc(64)
    cu.start(0)
    _, function = cu.function(kernel("ld.global.u32 %r1, [%d0];"), "k")
    cu.launch(function, None, [C.c_uint64(theirs)])
    assert cu.code("cuStreamSynchronize", None) == 700
    assert "another device" in simulator.report()[0]


def test_leaks_are_counted_by_kind(simulator, cu):
    simulator.reset(Schedule.LAZY)
    cu.start()
    stream = cu.stream()
    cu.event(), cu.event()
    cu.cuMemAlloc(8), cu.cuMemHostAlloc(8, 0)
    cu.cuModuleLoadData(kernel(""))
    simulator.work(stream, [], "work")
    kinds = {"contexts": 1, "streams": 1, "events": 2, "modules": 1, "device": 1, "pinned": 1, "pending": 1}
    assert simulator.leaks() == kinds
    simulator.reset()
    assert simulator.leaks() == {}
