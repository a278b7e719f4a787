"""Stream capture: what is legal, what is refused with which code, and replay."""

from __future__ import annotations

import ctypes as C
import threading

import numpy as np
import pytest

from .images import kernel
from .sim import Range, Schedule

pytestmark = pytest.mark.long

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
INCREMENT = "ld.global.u32 %r1, [%d0]; add.u32 %r1, %r1, 1; st.global.u32 [%d0], %r1;"


@pytest.fixture
def two(sim, cu):
    """Two streams and an event, and at the end nothing alive."""
    cu.start()
    a, b, e = cu.stream(), cu.stream(), cu.event()
    yield a, b, e
    for stream in (a, b):
        cu.code("cuStreamDestroy", stream)
    cu.cuEventDestroy(e)
    cu.cuDevicePrimaryCtxRelease(0)


def status(cu, stream: int) -> int:
    return cu.cuStreamIsCapturing(stream)


def end(cu, stream: int) -> int:
    """The code that ending a capture returns."""
    return cu.code("cuStreamEndCapture", stream)


@pytest.fixture
def counter(sim, cu):
    """A kernel that increments a word, and the word."""
    word = np.zeros(1, np.uint32)
    sim.register(word.ctypes.data, 4, "word", keep=word)
    module, function = None, None

    def launch(stream: int) -> None:
        nonlocal module, function
        if module is None:
            module, function = cu.function(kernel(INCREMENT), "k")
        cu.launch(function, stream, [C.c_uint64(word.ctypes.data)])

    def load() -> None:
        nonlocal module, function
        module, function = cu.function(kernel(INCREMENT), "k")

    launch.load, launch.word, launch.unload = load, word, lambda: cu.cuModuleUnload(module)
    return launch


def test_captured_work_runs_at_replay_only(sim, cu, two, counter):
    a, _, _ = two
    counter.load()
    cu.cuStreamBeginCapture(a, GLOBAL)
    counter(a)
    counter(a)
    assert status(cu, a) == 1
    graph = cu.cuStreamEndCapture(a)
    assert status(cu, a) == 0
    cu.cuCtxSynchronize()
    assert counter.word[0] == 0
    exec_ = cu.cuGraphInstantiate(graph, 0)
    cu.cuGraphDestroy(graph)
    for _ in range(3):
        cu.cuGraphLaunch(exec_, a)
    cu.cuStreamSynchronize(a)
    assert counter.word[0] == 6
    cu.cuGraphExecDestroy(exec_)
    counter.unload()


def test_fork_and_join_inside_a_capture_keep_their_order(sim, cu, two, counter):
    a, b, e = two
    f = cu.event()
    counter.load()
    cu.cuStreamBeginCapture(a, GLOBAL)
    counter(a)
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    assert status(cu, b) == 1
    counter(b)
    cu.cuEventRecord(f, b)
    cu.cuStreamWaitEvent(a, f, 0)
    counter(a)
    graph = cu.cuStreamEndCapture(a)
    assert status(cu, b) == 0
    exec_ = cu.cuGraphInstantiate(graph, 0)
    cu.cuGraphLaunch(exec_, a)
    cu.cuGraphLaunch(exec_, a)
    cu.cuStreamSynchronize(a)
    assert counter.word[0] == 6
    cu.cuGraphExecDestroy(exec_)
    cu.cuGraphDestroy(graph)
    cu.cuEventDestroy(f)
    counter.unload()


def test_race_inside_a_graph_is_found_at_replay(sim, cu, two, counter):
    a, b, e = two
    f = cu.event()
    counter.load()
    cu.cuStreamBeginCapture(a, GLOBAL)
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    counter(b)
    counter(a)  # not ordered with the other
    cu.cuEventRecord(f, b)
    cu.cuStreamWaitEvent(a, f, 0)
    graph = cu.cuStreamEndCapture(a)
    exec_ = cu.cuGraphInstantiate(graph, 0)
    cu.cuGraphLaunch(exec_, a)
    cu.cuStreamSynchronize(a)
    sim.expect("RACE", "k on graph lane")
    cu.cuGraphExecDestroy(exec_)
    cu.cuGraphDestroy(graph)
    cu.cuEventDestroy(f)
    counter.unload()


def test_replay_is_ordered_with_its_stream_only(sim, cu, two, counter):
    a, b, _ = two
    counter.load()
    word = [Range(counter.word.ctypes.data, 4, write=True)]
    cu.cuStreamBeginCapture(a, GLOBAL)
    counter(a)
    graph = cu.cuStreamEndCapture(a)
    exec_ = cu.cuGraphInstantiate(graph, 0)
    sim.work(a, word, "before")
    cu.cuGraphLaunch(exec_, a)
    sim.work(a, word, "after")
    cu.cuCtxSynchronize()
    assert sim.report() == []
    cu.cuGraphLaunch(exec_, a)
    sim.work(b, word, "elsewhere")
    cu.cuCtxSynchronize()
    sim.expect("RACE", "elsewhere")
    cu.cuGraphExecDestroy(exec_)
    cu.cuGraphDestroy(graph)
    counter.unload()


def test_captured_copy_reads_its_source_at_every_replay(sim, cu, two):
    a, _, _ = two
    memory, pinned = cu.cuMemAlloc(4), cu.cuMemHostAlloc(4, 0)
    source = C.c_uint32.from_address(pinned)
    out = np.zeros(1, np.uint32)
    cu.cuStreamBeginCapture(a, GLOBAL)
    cu.cuMemcpyHtoDAsync(memory, pinned, 4, a)
    graph = cu.cuStreamEndCapture(a)
    exec_ = cu.cuGraphInstantiate(graph, 0)
    for value in (3, 4):
        source.value = value
        cu.cuGraphLaunch(exec_, a)
        cu.cuMemcpyDtoHAsync(out.ctypes.data, memory, 4, a)
        assert out[0] == value
    cu.cuGraphLaunch(exec_, a)
    source.value = 5  # before anybody could know that the copy was done
    cu.cuStreamSynchronize(a)
    sim.expect("STAGING-OVERWRITE")
    cu.cuGraphExecDestroy(exec_)
    cu.cuGraphDestroy(graph)
    cu.cuMemFree(memory)
    cu.cuMemFreeHost(pinned)


def test_wait_for_an_event_from_before_the_capture_is_isolation(sim, cu, two):
    a, b, e = two
    cu.cuEventRecord(e, b)
    cu.cuStreamBeginCapture(a, GLOBAL)
    assert cu.code("cuStreamWaitEvent", a, e, 0) == 905
    assert status(cu, a) == 2
    assert end(cu, a) == 901
    assert status(cu, a) == 0


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_waiting_for_a_capturing_stream_spoils_the_capture(sim, cu, two, call):
    a, _, _ = two
    cu.cuStreamBeginCapture(a, RELAXED)
    assert cu.code(call, a) == 900
    assert end(cu, a) == 901


@pytest.mark.parametrize("call", ["cuEventSynchronize", "cuEventQuery"])
def test_waiting_for_a_captured_event_spoils_the_capture(sim, cu, two, call):
    a, _, e = two
    cu.cuStreamBeginCapture(a, RELAXED)
    cu.cuEventRecord(e, a)
    assert cu.code(call, e) == 907
    assert end(cu, a) == 901


def test_captured_event_means_nothing_after_the_capture(sim, cu, two):
    a, b, e = two
    cu.cuStreamBeginCapture(a, GLOBAL)
    cu.cuEventRecord(e, a)
    cu.cuGraphDestroy(cu.cuStreamEndCapture(a))
    assert cu.code("cuStreamWaitEvent", b, e, 0) == 907
    assert cu.code("cuEventQuery", e) == 907
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)


def test_fork_that_is_not_joined_is_904(sim, cu, two, counter):
    a, b, e = two
    counter.load()
    cu.cuStreamBeginCapture(a, GLOBAL)
    counter(a)
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    counter(b)
    assert end(cu, a) == 904
    assert status(cu, b) == 0
    counter.unload()


def test_end_on_a_side_stream_is_903_and_without_a_capture_401(sim, cu, two):
    a, b, e = two
    assert end(cu, a) == 401
    cu.cuStreamBeginCapture(a, GLOBAL)
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    assert end(cu, b) == 903
    cu.cuGraphDestroy(cu.cuStreamEndCapture(a))


def test_two_captures_must_not_meet(sim, cu, two):
    a, b, e = two
    cu.cuStreamBeginCapture(a, GLOBAL)
    cu.cuStreamBeginCapture(b, GLOBAL)
    cu.cuEventRecord(e, a)
    assert cu.code("cuStreamWaitEvent", b, e, 0) == 902
    assert (end(cu, a), end(cu, b)) == (901, 901)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_calls_are_forbidden_except_in_relaxed_mode(sim, cu, two, mode):
    a, _, e = two
    cu.cuStreamBeginCapture(a, mode)
    if mode == RELAXED:
        cu.cuMemFree(cu.cuMemAlloc(64))
        assert cu.code("cuEventQuery", e) == 0
        cu.cuGraphDestroy(cu.cuStreamEndCapture(a))
    else:
        assert cu.code("cuMemAlloc", 64) == 900
        assert end(cu, a) == 901


@pytest.mark.parametrize(("mode", "code"), [(GLOBAL, 900), (THREAD_LOCAL, 0)])
def test_unsafe_call_of_another_thread_spoils_a_global_capture_only(sim, cu, two, mode, code):
    a, _, e = two
    context = cu.cuCtxGetCurrent()
    codes = []

    def other() -> None:
        cu.cuCtxSetCurrent(context)
        codes.append(cu.code("cuEventQuery", e))

    cu.cuStreamBeginCapture(a, mode)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert codes == [code]
    assert end(cu, a) == (901 if code else 0)
    sim.allow_leaks("graphs")


def test_capture_ends_on_the_thread_that_began_it(sim, cu, two):
    a, _, _ = two
    context = cu.cuCtxGetCurrent()
    codes = []

    def other() -> None:
        cu.cuCtxSetCurrent(context)
        codes.append(end(cu, a))

    cu.cuStreamBeginCapture(a, GLOBAL)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert codes == [908]
    cu.cuGraphDestroy(cu.cuStreamEndCapture(a))


def test_default_stream_cannot_be_captured_nor_wait_for_a_captured_blocking_stream(sim, cu, two, counter):
    assert cu.code("cuStreamBeginCapture", None, GLOBAL) == 900
    counter.load()
    blocking = cu.stream(0)
    cu.cuStreamBeginCapture(blocking, GLOBAL)
    with pytest.raises(Exception, match="906"):
        counter(None)
    assert end(cu, blocking) == 901
    cu.cuStreamDestroy(blocking)
    counter.unload()


def test_other_streams_go_on_during_a_capture(simulator, cu):
    simulator.reset(Schedule.EAGER)
    cu.start()
    a, b = cu.stream(), cu.stream()
    word = np.zeros(1, np.uint32)
    simulator.register(word.ctypes.data, 4, "word", keep=word)
    cu.cuStreamBeginCapture(a, GLOBAL)
    simulator.work(b, [], "work", word.ctypes.data, np.ones(1, np.uint32).tobytes())
    assert word[0] == 1
    cu.cuStreamEndCapture(a)
