"""The caching allocator's rule of streams: freed memory is the allocating stream's at once, unless others were recorded."""

from __future__ import annotations

import pytest

from .sim import Range, Schedule

pytestmark = pytest.mark.long


@pytest.fixture
def two(sim, cu):
    """Two streams; the first one is current."""
    cu.start()
    streams = cu.stream(), cu.stream()
    sim.name_stream(streams[0], "first")
    sim.name_stream(streams[1], "second")
    sim.simulator.current_stream = streams[0]
    yield streams
    sim.simulator.current_stream = None
    sim.cache_abandon()
    for stream in streams:
        cu.cuStreamDestroy(stream)
    cu.cuDevicePrimaryCtxRelease(0)


def use(sim, stream: int, base: int, write: bool = False) -> None:
    sim.work(stream, [Range(base, 64, write)], "use")


def test_freed_memory_is_the_next_of_its_stream_and_of_no_other(sim, two):
    first = sim.cache_allocate(100)
    assert sim.cache_free(first)
    sim.simulator.current_stream = two[1]
    assert sim.cache_allocate(100) != first
    sim.simulator.current_stream = two[0]
    assert sim.cache_allocate(300) == first  # both round to 512 bytes
    assert sim.cache_counts() == {"live": 2, "free": 0, "waiting": 0}


def test_memory_freed_while_another_stream_uses_it_is_found(sim, two):
    base = sim.cache_allocate(64)
    sim.order(two[1], two[0])
    use(sim, two[1], base)
    sim.cache_free(base)
    sim.simulator.synchronize()
    assert "use on second" in sim.expect("RACE", "free on first")


def test_memory_freed_after_its_stream_waited_for_the_other_is_fine(sim, two):
    base = sim.cache_allocate(64)
    sim.order(two[1], two[0])
    use(sim, two[1], base, write=True)
    sim.order(two[0], two[1])
    sim.cache_free(base)
    assert sim.cache_allocate(64) == base
    use(sim, two[0], base, write=True)
    sim.simulator.synchronize()


def test_recorded_stream_holds_memory_back_until_it_is_done(sim, two):
    base = sim.cache_allocate(64)
    sim.order(two[1], two[0])
    use(sim, two[1], base)
    assert sim.cache_record_stream(base, two[1])
    sim.cache_free(base)
    if sim.schedule == Schedule.LAZY:
        assert sim.cache_counts() == {"live": 0, "free": 0, "waiting": 1}
        assert sim.cache_allocate(64) != base
    sim.drain()
    assert sim.cache_allocate(64) == base
    use(sim, two[0], base, write=True)
    sim.simulator.synchronize()


def test_only_recorded_streams_hold_memory_back(sim, cu, two):
    third = cu.stream()
    base = sim.cache_allocate(64)
    sim.order(two[1], two[0])
    sim.order(third, two[0])
    use(sim, two[1], base)
    use(sim, third, base)
    sim.cache_record_stream(base, two[1])
    sim.cache_free(base)
    cu.cuStreamSynchronize(two[1])
    sim.cache_allocate(64)
    sim.simulator.synchronize()
    sim.expect("RACE", " on first", "use on stream")  # the free, or what has the memory next
    cu.cuStreamDestroy(third)


def test_use_of_freed_memory_is_found_where_it_is_ordered_too(sim, two):
    base = sim.cache_allocate(64)
    sim.cache_free(base)
    use(sim, two[0], base)
    sim.simulator.synchronize()
    sim.expect("USE-AFTER-FREE", "use on first", "free on first")


def test_new_memory_is_its_streams_until_others_are_ordered_after_it(sim, two):
    base = sim.cache_allocate(64)
    use(sim, two[1], base, write=True)
    sim.simulator.synchronize()
    sim.expect("RACE", "allocation on first", "use on second")


def test_what_is_still_referred_to_when_the_pools_end_is_host_memory(sim, two):
    base = sim.cache_allocate(64)
    assert sim.is_device_memory(base)
    sim.cache_abandon()
    assert not sim.is_device_memory(base)
    assert sim.cache_free(base)
    assert not sim.cache_free(base)
