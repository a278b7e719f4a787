"""Collectives on the process group's stream: wait() orders streams, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from .bridge import Bridge
from .sim import Schedule

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def bridge(sim, cu) -> Iterator[Bridge]:
    cu.start()
    streams = [cu.stream() for _ in range(4)]
    for stream, name in zip(streams, ("user", "other", "communication", "callbacks"), strict=True):
        sim.name_stream(stream, name)
    bridge = Bridge(sim.simulator, streams[0], *streams[2:])
    bridge.other, bridge.checked = streams[1], sim
    with bridge:
        yield bridge
    bridge.close()
    for stream in streams:
        cu.cuStreamDestroy(stream)
    cu.cuDevicePrimaryCtxRelease(0)


def test_wait_orders_the_current_stream_after_the_collective(bridge):
    x = torch.ones(8)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait()
    x.mul_(2)
    assert x.tolist() == [2.0] * 8


def test_missing_wait_is_found(bridge):
    x = torch.ones(8)
    dist.all_reduce(x, async_op=True)
    x.mul_(2)
    bridge.synchronize()
    assert "communication" in bridge.checked.expect("RACE", "allreduce_", "aten.mul_")


def test_wait_on_another_stream_does_not_order_this_one(bridge):
    x = torch.ones(8)
    work = dist.all_reduce(x, async_op=True)
    with bridge.stream(bridge.other):
        work.wait()
    x.mul_(2)
    bridge.synchronize()
    bridge.checked.expect("RACE", "allreduce_", "aten.mul_")


def test_wait_covers_its_own_collective_and_those_before(bridge):
    a, b, c = torch.ones(8), torch.ones(8), torch.ones(8)
    _, second, _ = [dist.all_reduce(x, async_op=True) for x in (a, b, c)]
    second.wait()
    a + b
    c.mul_(2)
    bridge.synchronize()
    assert "aten.mul_" in bridge.checked.expect("RACE", "allreduce_")
    assert not [line for line in bridge.checked.report() if "aten.add" in line]


def test_input_is_what_the_callers_stream_makes_it(bridge):
    x = torch.zeros(8)
    x.add_(5)
    dist.all_reduce(x, async_op=True).wait()
    assert x.sum().item() == 40


def test_group_keeps_tensors_until_wait(bridge):
    x = torch.ones(256)
    address = x.data_ptr()
    work = dist.all_reduce(x, async_op=True)
    del x
    other = torch.ones(256)
    assert other.data_ptr() != address
    work.wait()
    assert torch.ones(256).data_ptr() == address


def test_memory_freed_by_hand_under_a_collective_is_found(bridge):
    x = torch.ones(256)
    dist.all_reduce(x, async_op=True)
    x.untyped_storage().resize_(0)
    bridge.synchronize()
    bridge.checked.expect("RACE", "free on user", "allreduce_")


def test_results_land_late(bridge):
    if bridge.checked.schedule != Schedule.LAZY:
        pytest.skip("another schedule may have run it")
    dist.all_reduce(torch.arange(4.0), async_op=True)
    assert bridge.sim.live("pending") > 0


def test_future_of_a_communication_hook_orders_whoever_waits_for_it(bridge):
    class Bucket:
        def __init__(self) -> None:
            self.x = torch.full((8,), 3.0)

        def buffer(self) -> torch.Tensor:
            return self.x

    result = allreduce_hook(dist.group.WORLD, Bucket()).wait()
    result.mul_(2)
    assert result.sum().item() == 48


def test_value_of_a_future_taken_without_wait_is_found(bridge):
    x = torch.ones(8)
    future = dist.all_reduce(x, async_op=True).get_future()
    future.value()[0].mul_(2)
    bridge.synchronize()
    bridge.checked.expect("RACE", "allreduce_", "aten.mul_")


def test_blocking_collective_orders_without_blocking_the_host(bridge):
    x = torch.ones(8)
    dist.all_reduce(x)
    x.add_(1)
    dist.barrier()
    assert bridge.syncs == []
    assert x.sum().item() == 16
