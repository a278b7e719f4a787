"""Backwards in autograd's thread, each node on the stream of its forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.autograd import Variable

from .autograd import device_thread
from .bridge import Bridge

pytestmark = pytest.mark.long


@pytest.fixture
def bridge(sim, cu) -> Iterator[Bridge]:
    cu.start()
    streams = [cu.stream() for _ in range(3)]
    for stream, name in zip(streams, ("user", "other", "caller"), strict=True):
        sim.name_stream(stream, name)
    bridge = Bridge(sim.simulator, streams[0])
    bridge.other, bridge.caller, bridge.checked = streams[1], streams[2], sim
    with bridge, device_thread(bridge):
        yield bridge
    bridge.close()
    for stream in streams:
        cu.cuStreamDestroy(stream)
    cu.cuDevicePrimaryCtxRelease(0)


def two_streams(bridge: Bridge, w: torch.Tensor) -> torch.Tensor:
    """The first half on one stream, the second on another, as a user orders them."""
    h = w * 2
    h.record_stream(bridge.stream_object(bridge.other))
    bridge.sim.order(bridge.other, bridge.current)
    with bridge.stream(bridge.other):
        loss = (h * h).sum()
    bridge.sim.order(bridge.current, bridge.other)
    return loss


def test_backward_runs_in_another_thread_and_hooks_too(bridge):
    w = torch.ones(8, requires_grad=True)
    seen = []
    w.register_post_accumulate_grad_hook(lambda _: seen.append((threading.get_ident(), bridge.current)))
    w.square().sum().backward()
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1] == bridge.current
    assert w.grad.tolist() == [2.0] * 8


def test_nodes_run_on_the_streams_of_their_forward(bridge):
    w = torch.ones(8, requires_grad=True)
    streams = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            streams.append(bridge.current)
            return grad.clone()

    h = Seen.apply(w)
    h.record_stream(bridge.stream_object(bridge.other))
    bridge.sim.order(bridge.other, bridge.current)
    with bridge.stream(bridge.other):
        loss = Seen.apply(h).sum()
    with bridge.stream(bridge.caller):
        bridge.sim.order(bridge.caller, bridge.other)
        loss.backward()
        w.grad.mul_(2)  # the caller's stream comes after the leaves'
    bridge.synchronize()
    assert streams == [bridge.other, bridge.current]
    assert w.grad.tolist() == [2.0] * 8


def test_engine_orders_the_streams_of_nodes(bridge):
    w = torch.ones(8, requires_grad=True)
    two_streams(bridge, w).backward()
    w.grad.add_(1)
    bridge.synchronize()
    assert w.grad.tolist() == [9.0] * 8


def test_saved_tensor_of_another_streams_node_that_nobody_recorded_is_found(bridge):
    w = torch.ones(8, requires_grad=True)
    h = w * 2
    bridge.sim.order(bridge.other, bridge.current)
    with bridge.stream(bridge.other):
        loss = (h * h).sum()
    del h
    loss.backward()
    bridge.synchronize()
    bridge.checked.expect("RACE", "aten.mul", "on other", "free on user")


def test_hook_that_uses_a_gradient_on_another_stream_is_found(bridge):
    w = torch.ones(8, requires_grad=True)
    kept = []

    def hook(p: torch.Tensor) -> None:
        with bridge.stream(bridge.caller):
            kept.append(p.grad + 1)

    w.register_post_accumulate_grad_hook(hook)
    two_streams(bridge, w).backward()
    bridge.synchronize()
    bridge.checked.expect("RACE", "aten.add", "on caller")


def test_caller_is_ordered_only_at_the_end(bridge):
    """A hook that gives memory to a stream that the backward's has not been ordered with."""
    w = torch.ones(8, requires_grad=True)
    with bridge.stream(bridge.other):
        scratch = torch.ones(8)

    def hook(p: torch.Tensor) -> None:
        scratch.copy_(p.grad)

    w.register_post_accumulate_grad_hook(hook)
    w.square().sum().backward()
    bridge.synchronize()
    bridge.checked.expect("RACE", "aten.ones", "aten.copy_")


def test_callback_runs_with_the_callers_stream_after_all_leaves(bridge):
    w = torch.ones(8, requires_grad=True)
    seen = []

    def end() -> None:
        seen.append(bridge.current)
        w.grad.add_(1)

    loss = two_streams(bridge, w)
    w.register_post_accumulate_grad_hook(lambda _: Variable._execution_engine.queue_callback(end))
    bridge.sim.order(bridge.caller, bridge.current)
    with bridge.stream(bridge.caller):
        loss.backward()
    bridge.synchronize()
    assert seen == [bridge.caller]


def test_errors_reach_the_caller_and_the_engine_is_restored(bridge):
    w = torch.ones(8, requires_grad=True)

    def hook(_: torch.Tensor) -> None:
        raise KeyError("mine")

    w.register_post_accumulate_grad_hook(hook)
    with pytest.raises(KeyError, match="mine"):
        w.sum().backward()
    x = torch.ones(8, requires_grad=True)
    x.sum().backward()
    assert torch.autograd.grad((x * 3).sum(), [x])[0].tolist() == [3.0] * 8


def test_engine_is_pytorchs_outside(simulator, cu):
    simulator.reset()
    cu.start()
    real = Variable._execution_engine
    with device_thread(Bridge(simulator, cu.stream())):
        assert Variable._execution_engine is not real
    assert Variable._execution_engine is real
