"""Every seeded bug is found in every schedule, and correct code never accused."""

from __future__ import annotations

import ctypes as C

import numpy as np
import pytest

from .caster import Caster
from .driver import Driver
from .fixtures import Checked
from .images import sample
from .sim import HOST, Range, Schedule
from .test_instructions import assert_same_floats, bf16, floats, widened

pytestmark = pytest.mark.long

SIZES = [5000, 17, 4096, 1, 8193]


def read(array: np.ndarray) -> Range:
    return Range(array.ctypes.data, array.nbytes)


def write(array: np.ndarray) -> Range:
    return Range(array.ctypes.data, array.nbytes, write=True)


def register(sim: Checked, **arrays: np.ndarray) -> None:
    for name, array in arrays.items():
        sim.register(array.ctypes.data, array.nbytes, name, keep=array)


def train(sim: Checked, cu: Driver, *, steps: int = 3, forward_waits: bool = True, **bugs: bool) -> int:
    """An optimizer writes masters on one stream, a caster copies them on its own, forward reads the copies.

    Returns how many elements were wrong.
    """
    masters = [np.zeros(n, np.float32) for n in SIZES]
    copies = [np.zeros(n, np.uint16) for n in SIZES]
    register(sim, **{f"master{i}": a for i, a in enumerate(masters)}, **{f"copy{i}": a for i, a in enumerate(copies)})
    caster = Caster(cu, **bugs)
    compute = cu.stream()
    wrong = 0
    try:
        for step in range(steps):
            values = [floats(max(n, 64), step)[:n] for n in SIZES]
            for master, value in zip(masters, values, strict=True):
                sim.work(compute, [write(master)], "optimizer.step", master.ctypes.data, value.tobytes())
            caster.cast([(m.ctypes.data, m.size) for m in masters], [c.ctypes.data for c in copies], compute)
            if forward_waits:
                cu.cuStreamWaitEvent(compute, caster.ready, 0)
            sim.enter(compute)
            for copy, value in zip(copies, values, strict=True):
                wrong += int(((copy != bf16(value)) & ~np.isnan(value)).sum())
            sim.access(compute, [read(copy) for copy in copies], "forward")
        cu.cuStreamSynchronize(compute)
    finally:
        caster.close()
        cu.cuStreamDestroy(compute)
    return wrong


def test_correct_code_is_bit_exact_and_never_accused(sim, cu):
    assert train(sim, cu) == 0


def test_missing_wait_for_the_caller_is_found(sim, cu):
    train(sim, cu, waits_for_caller=False)
    found = sim.expect("RACE", "optimizer.step")
    assert "cast_f32_bf16" in found
    sim.expect("RACE")


def test_missing_wait_of_the_caller_is_found(sim, cu):
    wrong = train(sim, cu, forward_waits=False)
    sim.expect("RACE", "forward")
    sim.expect("RACE")  # and the next optimizer step writes what the cast may still read
    if sim.schedule == Schedule.LAZY:
        assert wrong > 0  # nothing had run yet


def test_table_rewritten_under_a_pending_copy_is_found(sim, cu):
    masters = [np.ones(n, np.float32) for n in (64, 64)]
    copies = [np.zeros(n, np.uint16) for n in (64, 64)]
    register(sim, a=masters[0], b=masters[1], c=copies[0], d=copies[1])
    caster = Caster(cu, waits_before_rewrite=False)
    for m, c in zip(masters, copies, strict=True):
        caster.cast([(m.ctypes.data, m.size)], [c.ctypes.data], caster.stream)
    caster.close()
    sim.expect("STAGING-OVERWRITE", "pinned memory")


def test_table_rewritten_after_a_query_saw_the_copy_done_is_fine(sim, cu):
    master, copies = np.ones(64, np.float32), [np.zeros(64, np.uint16), np.zeros(64, np.uint16)]
    register(sim, a=master, b=copies[0], c=copies[1])
    caster = Caster(cu, waits_before_rewrite=False)
    for copy in copies:
        caster.cast([(master.ctypes.data, 64)], [copy.ctypes.data], caster.stream)
        while cu.code("cuEventQuery", caster.ready) == 600:
            pass
        assert (copy == 0x3F80).all()
    caster.close()


# Events


@pytest.fixture
def two(sim, cu):
    """Two streams, two events and an array."""
    cu.start()
    array = np.zeros(16, np.float32)
    register(sim, x=array)
    a, b, e, f = cu.stream(), cu.stream(), cu.event(), cu.event()
    yield a, b, e, f, array
    for stream in (a, b):
        cu.cuStreamSynchronize(stream)
        cu.cuStreamDestroy(stream)
    for event in (e, f):
        cu.cuEventDestroy(event)
    cu.cuDevicePrimaryCtxRelease(0)


def test_wait_orders_streams(sim, cu, two):
    a, b, e, _, x = two
    sim.work(a, [write(x)], "writer")
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    sim.work(b, [read(x)], "reader")


def test_order_is_transitive(sim, cu, two):
    a, b, e, f, x = two
    c = cu.stream()
    sim.work(a, [write(x)], "writer")
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(c, e, 0)
    cu.cuEventRecord(f, c)
    cu.cuStreamWaitEvent(b, f, 0)
    sim.work(b, [write(x)], "second writer")
    cu.cuStreamDestroy(c)


def test_wait_takes_the_record_of_its_time(sim, cu, two):
    a, b, e, _, x = two
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    sim.work(a, [write(x)], "late writer")
    cu.cuEventRecord(e, a)
    sim.work(b, [read(x)], "reader")
    cu.cuCtxSynchronize()
    sim.expect("RACE", "late writer", "reader")


def test_record_after_the_wait_does_not_order(sim, cu, two):
    a, b, e, _, x = two
    cu.cuStreamWaitEvent(b, e, 0)  # never recorded: no wait at all
    sim.work(a, [write(x)], "writer")
    cu.cuEventRecord(e, a)
    sim.work(b, [read(x)], "reader")
    cu.cuCtxSynchronize()
    sim.expect("RACE", "writer", "reader")


def test_two_readers_do_not_race_but_a_writer_must_wait_for_both(sim, cu, two):
    a, b, e, _, x = two
    c = cu.stream()
    sim.work(a, [read(x)], "reader one")
    sim.work(b, [read(x)], "reader two")
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(c, e, 0)
    sim.work(c, [write(x)], "writer")
    cu.cuCtxSynchronize()
    cu.cuStreamDestroy(c)
    assert "reader two" in sim.expect("RACE")
    assert not any("reader one" in line for line in sim.report())


def test_disjoint_bytes_do_not_race(sim, cu, two):
    a, b, _, _, x = two
    sim.work(a, [Range(x.ctypes.data, 32, True)], "low half")
    sim.work(b, [Range(x.ctypes.data + 32, 32, True)], "high half")
    sim.work(b, [Range(x.ctypes.data + 28, 8, True)], "across")
    cu.cuCtxSynchronize()
    assert "bytes [28, 32) of x" in sim.expect("RACE", "low half", "across")
    assert sim.count() == 1


def test_synchronising_orders_with_everything_later(sim, cu, two):
    a, b, _, _, x = two
    sim.work(a, [write(x)], "writer")
    cu.cuStreamSynchronize(a)
    sim.work(b, [write(x)], "after the host waited")


def test_host_access_needs_a_wait(sim, cu, two):
    a, _, e, _, x = two
    sim.work(a, [write(x)], "writer")
    cu.cuEventRecord(e, a)
    sim.access(HOST, [read(x)], "host")
    cu.cuEventSynchronize(e)
    sim.access(HOST, [read(x)], "host, later")
    found = sim.expect("RACE", "<host>")
    assert not any("later" in line for line in sim.report()), found


def test_work_is_ordered_after_what_the_host_did_before(sim, cu, two):
    a, b, _, _, x = two
    sim.access(HOST, [write(x)], "host")
    sim.work(a, [read(x)], "reader")
    sim.work(b, [read(x)], "reader")


def test_default_stream_waits_for_blocking_streams_only(sim, cu, two):
    a, _, _, _, x = two
    y = np.zeros(4, np.float32)
    register(sim, y=y)
    blocking = cu.stream(0)
    sim.work(blocking, [write(y)], "blocking writer")
    sim.work(None, [write(y)], "default stream")
    sim.work(blocking, [write(y)], "blocking again")
    cu.cuCtxSynchronize()
    assert sim.report() == []
    sim.work(a, [write(x)], "non-blocking writer")
    sim.work(None, [write(x)], "default stream")
    cu.cuCtxSynchronize()
    cu.cuStreamDestroy(blocking)
    sim.expect("RACE", "non-blocking writer")


def test_stream_with_only_a_wait_is_not_idle(sim, cu, two):
    a, b, e, _, x = two
    sim.work(a, [write(x)], "writer", x.ctypes.data, np.ones(16, np.float32).tobytes())
    cu.cuEventRecord(e, a)
    cu.cuStreamWaitEvent(b, e, 0)
    cu.cuStreamSynchronize(b)
    assert (x == 1).all()


# Schedules


def test_lazy_runs_only_what_the_wait_needs(simulator, cu):
    simulator.reset(Schedule.LAZY)
    cu.start()
    a, b, e = cu.stream(), cu.stream(), cu.event()
    x, y, z = (np.zeros(1, np.int32) for _ in range(3))
    one = np.ones(1, np.int32).tobytes()
    for array in (x, y, z):
        simulator.register(array.ctypes.data, 4, "", keep=array)
    simulator.work(a, [], "x", x.ctypes.data, one)
    cu.cuEventRecord(e, a)
    simulator.work(a, [], "y", y.ctypes.data, one)
    simulator.work(b, [], "z", z.ctypes.data, one)
    assert (x[0], y[0], z[0]) == (0, 0, 0)
    cu.cuEventSynchronize(e)
    assert (x[0], y[0], z[0]) == (1, 0, 0)
    assert simulator.live("pending") == 2
    cu.cuStreamSynchronize(b)
    assert (x[0], y[0], z[0]) == (1, 0, 1)
    assert simulator.step(10) == 1
    assert y[0] == 1


def trace(simulator, cu, schedule: Schedule, seed: int) -> list[int]:
    """The order in which racing streams get to append their number."""
    simulator.reset(schedule, seed)
    cu.start()
    order: list[int] = []
    callback = C.CFUNCTYPE(None, C.c_void_p)(lambda number: order.append(number or 0))
    streams = [cu.stream() for _ in range(4)]
    for i in range(40):
        cu.cuLaunchHostFunc(streams[i % 4], C.cast(callback, C.c_void_p), i)
    for stream in reversed(streams):
        cu.cuStreamSynchronize(stream)
    return order


def test_schedules_replay_exactly_and_seeds_differ(simulator, cu):
    for schedule in (Schedule.EAGER, Schedule.LAZY, Schedule.RANDOM):
        assert trace(simulator, cu, schedule, 7) == trace(simulator, cu, schedule, 7)
    assert trace(simulator, cu, Schedule.EAGER, 1) == list(range(40))
    assert trace(simulator, cu, Schedule.LAZY, 1)[:10] == list(range(3, 40, 4))
    randoms = {tuple(trace(simulator, cu, Schedule.RANDOM, seed)) for seed in range(5)}
    assert len(randoms) == 5
    for order in (*randoms, trace(simulator, cu, Schedule.THREAD, 1)):
        for stream in range(4):  # in order within a stream, whatever the schedule
            assert [i for i in order if i % 4 == stream] == list(range(stream, 40, 4))


def test_report_is_the_same_in_every_replay(simulator, cu):
    def report(schedule: Schedule) -> list[str]:
        simulator.reset(schedule, 5)
        train(Checked(simulator, schedule, 5), cu, waits_for_caller=False)
        return simulator.report()

    for schedule in (Schedule.EAGER, Schedule.LAZY, Schedule.RANDOM):
        assert report(schedule) == report(schedule) != []


def test_delayed_work_runs_last(simulator, cu):
    simulator.reset(Schedule.RANDOM, 1)
    cu.start()
    a, b = cu.stream(), cu.stream()
    simulator.delay("slow")
    done = np.zeros(2, np.int32)
    simulator.register(done.ctypes.data, 8, "", keep=done)
    simulator.work(a, [], "slow", done.ctypes.data, np.ones(1, np.int32).tobytes())
    for _ in range(20):
        simulator.work(b, [], "fast")
    cu.cuStreamSynchronize(b)
    assert done[0] == 0
    cu.cuStreamSynchronize(a)
    assert done[0] == 1


def test_begin_keeps_objects_and_clears_findings(simulator, cu):
    simulator.reset(Schedule.LAZY)
    cu.start()
    a, b = cu.stream(), cu.stream()
    x = np.zeros(4, np.float32)
    simulator.register(x.ctypes.data, 16, "x", keep=x)
    simulator.work(a, [write(x)], "one")
    simulator.work(b, [write(x)], "two")
    simulator.begin(Schedule.EAGER)
    assert simulator.report() == []
    assert simulator.calls() == 0
    simulator.work(a, [write(x)], "three")  # ordered after all that went before
    assert simulator.report() == []
    assert simulator.leaks() == {"contexts": 1, "streams": 2}


def test_kernel_result_is_seen_by_the_next_one_on_its_stream(sim, cu):
    cu.start()
    stream = cu.stream()
    x, h, y = floats(4096, 1), np.zeros(4096, np.uint16), np.zeros(4096, np.float32)
    tables = [np.array(t, np.uint64) for t in ([x.ctypes.data, h.ctypes.data, 4096], [h.ctypes.data, y.ctypes.data, 4096])]
    register(sim, x=x, h=h, y=y, t0=tables[0], t1=tables[1])
    module, narrow = cu.function(sample(), "cast_f32_bf16")
    wide = cu.cuModuleGetFunction(module, b"cast_bf16_f32")
    for function, table in ((narrow, tables[0]), (wide, tables[1])):
        cu.launch(function, stream, [C.c_uint64(table.ctypes.data), C.c_int(1)], grid=2, block=32)
    cu.cuStreamSynchronize(stream)
    assert_same_floats(y, widened(bf16(x)))
    cu.cuModuleUnload(module)
    cu.cuStreamDestroy(stream)
    cu.cuDevicePrimaryCtxRelease(0)
