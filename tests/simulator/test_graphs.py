"""Graph capture through PyTorch: what is captured, what is refused, and what a replay races with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .bridge import Bridge
from .driver import DriverError
from .graphs import Graph

pytestmark = pytest.mark.long


@pytest.fixture
def bridge(sim, cu) -> Iterator[Bridge]:
    cu.start()
    streams = [cu.stream(), cu.stream()]
    bridge = Bridge(sim.simulator, streams[0])
    bridge.other, bridge.cu, bridge.checked = streams[1], cu, sim
    with bridge:
        yield bridge
    bridge.close()
    for stream in streams:
        cu.cuStreamDestroy(stream)
    cu.cuDevicePrimaryCtxRelease(0)


@pytest.fixture
def graph(bridge, cu) -> Iterator[Graph]:
    graph = Graph(cu, bridge)
    yield graph
    bridge.synchronize()
    graph.close()


def test_stream_says_that_it_is_captured(bridge, graph, cu):
    with graph.capture():
        assert cu.cuStreamIsCapturing(bridge.current) == 1
        assert bridge.sim.is_capturing(bridge.current)
    assert not bridge.sim.is_capturing(bridge.current)


def test_captured_ops_are_booked_at_each_replay_in_order(bridge, graph):
    x = torch.ones(8)
    with graph.capture():
        y = x * 2
        y.add_(1)
    graph.replay()
    graph.replay()
    x.mul_(2)
    y + x


def test_replay_races_with_an_op_on_another_stream(bridge, graph):
    x = torch.ones(8)
    with graph.capture():
        x.mul_(2)
    bridge.synchronize()
    graph.replay()
    with bridge.stream(bridge.other):
        x + 1
    bridge.synchronize()
    bridge.checked.expect("RACE", "aten.mul_", "aten.add")


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.cpu(), lambda x: x.tolist(), bool])
def test_reading_a_value_during_a_capture_is_an_error_and_spoils_it(bridge, graph, read):
    x = torch.ones(1)
    with pytest.raises(DriverError, match="901"), graph.capture():  # noqa: SIM117
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            read(x)


def test_other_streams_may_read_values_while_one_is_captured_in_a_relaxed_mode(bridge, graph):
    x = torch.ones(1)
    bridge.synchronize()
    with graph.capture("relaxed"), bridge.stream(bridge.other):
        assert x.item() == 1


def test_stream_joins_a_capture_by_waiting_for_it_and_must_come_back(bridge, graph):
    x = torch.ones(8)
    with graph.capture():
        bridge.sim.order(bridge.other, bridge.current)
        with bridge.stream(bridge.other):
            x.add_(1)
        bridge.sim.order(bridge.current, bridge.other)
    graph.replay()
    x.mul_(2)


def test_fork_that_does_not_come_back_is_refused(bridge, graph):
    x = torch.ones(8)

    def fork() -> None:
        with graph.capture():
            bridge.sim.order(bridge.other, bridge.current)
            with bridge.stream(bridge.other):
                x.add_(1)

    with pytest.raises(DriverError, match="904"):
        fork()


def test_waiting_for_an_event_from_before_is_refused(bridge, graph):
    with bridge.stream(bridge.other):
        before = bridge.record()
    with pytest.raises(DriverError, match="901"), graph.capture():  # noqa: SIM117
        with pytest.raises(ValueError, match="905"):
            bridge.wait(before)


def test_memory_of_a_graph_is_not_given_to_others(bridge, graph):
    x = torch.ones(64)
    with graph.capture():
        y = x + x
        address = y.data_ptr()
        del y
        assert (x + x).data_ptr() == address
    assert torch.ones(64).data_ptr() != address
