"""PyTorch through the bridge: training with casts on a stream of their own, and the bugs that must be seen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .bridge import Bridge
from .caster import Caster
from .sim import Schedule

pytestmark = pytest.mark.long


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 5))


def loss_of(model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.func.functional_call(model, weights, (x.bfloat16(),)).float() - y).square().mean()


def update(masters: dict[str, nn.Parameter], low: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, master in masters.items():
            master.add_(low[name].grad.float(), alpha=-0.1)
            low[name].grad = None


def train_plain(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The same computation without any stream."""
    masters, losses = dict(model.named_parameters()), []
    for x, y in batches:
        low = {name: p.detach().bfloat16().requires_grad_() for name, p in masters.items()}
        loss = loss_of(model, low, x, y)
        loss.backward()
        update(masters, low)
        losses.append(loss.item())
    return losses


def train_simulated(sim, cu, model: nn.Module, batches, *, forward_waits: bool = True, **bugs: bool) -> list[float]:
    """Casts on a stream of their own; forward, backward and update on the current stream."""
    masters, losses = dict(model.named_parameters()), []
    low = {name: torch.zeros_like(p, dtype=torch.bfloat16).requires_grad_() for name, p in masters.items()}
    caster = Caster(cu, **bugs)
    current = cu.stream()
    bridge = Bridge(sim.simulator, current)
    bridge.adopt(*masters.values(), *low.values())
    try:
        with bridge:
            for x, y in batches:
                sources = [(p.data_ptr(), p.numel()) for p in masters.values()]
                caster.cast(sources, [c.data_ptr() for c in low.values()], current)
                if forward_waits:
                    cu.cuStreamWaitEvent(current, caster.ready, 0)
                loss = loss_of(model, low, x, y)
                loss.backward()
                update(masters, low)
                losses.append(loss.detach())  # item() would make the host wait, and hide what the test is about
    finally:
        bridge.close()
        caster.close()
        cu.cuStreamDestroy(current)
    return [loss.item() for loss in losses]


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 33, generator=generator), torch.randn(8, 5, generator=generator)) for _ in range(3)]


def test_training_equals_plain_pytorch_and_is_never_accused(sim, cu, batches):
    model = make_model()
    expected = train_plain(copy.deepcopy(model), batches)
    assert train_simulated(sim, cu, model, batches) == expected


def test_cast_that_does_not_wait_for_the_optimizer_is_found(sim, cu, batches):
    train_simulated(sim, cu, make_model(), batches, waits_for_caller=False)
    assert "cast_f32_bf16" in sim.expect("RACE", "aten.add_")
    sim.expect("RACE")


def test_forward_that_does_not_wait_for_the_cast_is_found(sim, cu, batches):
    model = make_model()
    losses = train_simulated(sim, cu, model, batches, forward_waits=False)
    sim.expect("RACE", "cast_f32_bf16")
    sim.expect("RACE")
    if sim.schedule == Schedule.LAZY:
        assert losses != train_plain(make_model(), batches)


@pytest.fixture
def bridge(sim, cu):
    cu.start()
    streams = [cu.stream(), cu.stream()]
    bridge = Bridge(sim.simulator, streams[0])
    bridge.other, bridge.cu, bridge.sim = streams[1], cu, sim
    with bridge:
        yield bridge
    bridge.close()
    for stream in streams:
        cu.cuStreamDestroy(stream)
    cu.cuDevicePrimaryCtxRelease(0)


def test_ops_on_two_streams_need_an_order(bridge):
    x = torch.ones(8)
    with bridge.stream(bridge.other):
        x + 1
    assert "aten.ones" in bridge.sim.expect("RACE", "aten.add")


def test_views_are_not_accesses_and_disjoint_views_do_not_race(bridge):
    x = torch.zeros(16)
    bridge.synchronize()
    a, b = x[:8], x[8:]
    a.add_(1)
    with bridge.stream(bridge.other):
        b.add_(2)
        x.view(4, 4).t()
    bridge.synchronize()
    assert x.tolist() == [1] * 8 + [2] * 8


def test_reading_a_value_makes_the_host_wait(bridge):
    x = torch.ones(4)
    assert x.sum().item() == 4
    with bridge.stream(bridge.other):
        x.mul_(2)


def test_out_arguments_are_writes(bridge):
    x, y = torch.ones(4), torch.zeros(4)
    bridge.synchronize()
    torch.add(x, x, out=y)
    with bridge.stream(bridge.other):
        y.clone()
    bridge.sim.expect("RACE", "aten.add.out")


def test_storage_given_back_while_another_stream_uses_it_is_found(bridge):
    x = torch.ones(256)
    bridge.synchronize()
    with bridge.stream(bridge.other):
        x.clone()
    x.untyped_storage().resize_(0)
    assert "aten.clone" in bridge.sim.expect("RACE", "storage.resize_")


def test_storage_given_back_in_order_is_fine(bridge):
    x = torch.ones(256)
    x.clone()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(1024)
    x.fill_(3)
    assert x.sum().item() == 768


def test_current_stream_is_told_to_the_code_under_test(bridge):
    first = bridge.current
    assert bridge.sim.current_stream == first
    with bridge.stream(bridge.other):
        assert bridge.sim.current_stream == bridge.other
    assert bridge.sim.current_stream == first


def test_storage_methods_are_restored(simulator, cu):
    simulator.reset()
    cu.start()
    with Bridge(simulator, cu.stream()):
        assert "resize_" in torch.UntypedStorage.__dict__
    assert "resize_" not in torch.UntypedStorage.__dict__
    assert simulator.current_stream is None
