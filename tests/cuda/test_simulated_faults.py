"""Every driver call fails once, in what test_simulated_calls.py leaves out: events, options that keep copies, patching and
unpatching, the root hook alone, and opening a device.

The error says which call failed, how, and on which device; masters are in place; the next step is right; nothing is leaked
(that is what ``simulated_device`` checks when it ends).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.inside import _C
from kit.logs import logged
from kit.modules import mlp
from kit.oracle import mean_square, square_step
from kit.ranks import Rank, on_ranks
from kit.simulated import Device, require_simulator, simulated_device
from test_simulated_calls import ACTIONS, NOTHING, SMALL, Action, Bench, forward, program, sweep, sweep_of, use_full_precision
from test_simulated_training import device_of_pytorch
from torch.nn.parallel import DistributedDataParallel

import ddp_mp

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True, scope="module")
def _simulator() -> None:
    require_simulator()


# --- events --------------------------------------------------------------------------------------------------------------


def _engine(bench: Bench) -> _C.Engine:
    return bench.ddp._ddp_mp.plan.pool.groups[0].engine


def _event(bench: Bench) -> _C.Event:
    """The event behind the casts of a forward; whether they have run is the schedule's choice."""
    bench.ddp(bench.x)
    return _engine(bench).event(0)


EVENTS: dict[str, Action] = {
    "event of an engine": (lambda bench: bench.ddp(bench.x), lambda bench, _: _engine(bench).event(0)),
    "wait": (_event, lambda bench, event: event.wait()),
    "wait of a stream": (_event, lambda bench, event: event.wait(bench.device.other)),
    "query": (_event, lambda bench, event: event.query()),
    "synchronize": (_event, lambda bench, event: event.synchronize()),
    "wait of an engine": (lambda bench: bench.ddp(bench.x), lambda bench, _: _wait_elsewhere(bench)),
}


def _wait_elsewhere(bench: Bench) -> None:
    with bench.device.bridge.stream(bench.device.other):
        _engine(bench).wait()


@pytest.mark.long
@on_ranks(1)
@pytest.mark.parametrize("name", EVENTS)
def test_fault_of_every_call_of_an_event_surfaces(rank: Rank, name: str) -> None:
    with simulated_device() as device:
        sweep_of(Bench(rank, device), *EVENTS[name], must=True)


# --- copies that are kept, or made ahead of time -------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "prefetch": {"prefetch": True},
    "prefetch by module": {"prefetch": True, "wait": "module"},
    "reuse": {"reuse_unchanged": True},
}


def _step_of_optimizer(bench: Bench, _: Any) -> None:
    """Casting ahead is no part of the step: its errors are logged."""
    with logged() as messages:
        bench.optimizer.step()
    if messages:
        assert all(m.startswith("WARNING casting ahead failed") for m in messages)
        raise ddp_mp.DeviceError("; ".join(messages))


MORE_ACTIONS: dict[str, Action] = {
    **ACTIONS,
    "optimizer step": (lambda bench: square_step(bench.ddp, bench.x), _step_of_optimizer),
    "masters_changed and forward": (lambda bench: ddp_mp.masters_changed(bench.ddp), forward),
}
#: Those that call the driver: copies that are kept need no call, nor do masters that come back after a wait.
WITH_OPTIONS = [
    (options, name)
    for options, names in {
        "prefetch": ("forward", "forward without grad", "optimizer step"),
        "prefetch by module": ("backward", "backward in no_sync", "optimizer step"),
        "reuse": ("backward", "masters_changed and forward"),
    }.items()
    for name in names
]


@pytest.mark.long
@on_ranks(1)
@pytest.mark.parametrize(("options", "name"), WITH_OPTIONS)
def test_fault_of_every_call_with_options_surfaces(rank: Rank, name: str, options: str) -> None:
    before, action = MORE_ACTIONS[name]
    with simulated_device() as device:
        bench = Bench(rank, device, **OPTIONS[options])
        sweep_of(bench, before, action, must=True)


# --- patching and unpatching ---------------------------------------------------------------------------------------------


class Wrapped:
    """A model of its own for every fault: the same weights each time."""

    def __init__(self, device: Device, patched: bool) -> None:
        self.device = device
        torch.manual_seed(3)
        self.module = mlp(depth=3)
        device.bridge.adopt(*self.module.parameters())
        with device.host():
            self.masters = [p.detach().clone() for p in self.module.parameters()]
        self.ddp = DistributedDataParallel(self.module)
        if patched:
            self.patch()

    def patch(self, **options: Any) -> None:
        precision = ddp_mp.MixedPrecision(BF16, F32)
        ddp_mp.patch(self.ddp, mixed_precision=precision, options=ddp_mp.Options(**SMALL, **options))

    def step(self) -> list[torch.Tensor]:
        """Gradients of a step."""
        self.ddp.zero_grad()
        square_step(self.ddp, torch.linspace(-1, 1, 32).reshape(4, 8))
        with self.device.host():
            return [p.grad.clone() for p in self.module.parameters()]  # type: ignore[union-attr]

    def require_masters(self) -> None:
        with self.device.host():
            for param, master in zip(self.module.parameters(), self.masters, strict=True):
                assert param.dtype is F32, "masters are not in place"
                assert torch.equal(param.detach(), master), "a master has changed"


def _patch_and_step(wrapped: Wrapped) -> None:
    wrapped.patch()
    wrapped.step()


def _after_step(device: Device, **options: Any) -> Wrapped:
    wrapped = Wrapped(device, patched=False)
    wrapped.patch(**options)
    wrapped.step()
    return wrapped


def _after_prefetch(device: Device) -> Wrapped:
    """Copies are being made."""
    wrapped = _after_step(device, prefetch=True)
    torch.optim.SGD(wrapped.module.parameters(), lr=0.0).step()
    return wrapped


def _after_forward(device: Device) -> Wrapped:
    """Copies are in place, and nobody waited for those of the last layers."""
    wrapped = _after_step(device, wait="module")
    handle = wrapped.module[2].register_forward_pre_hook(_no_luck)
    with pytest.raises(ValueError, match="no luck"):
        wrapped.ddp(torch.ones(4, 8))
    handle.remove()
    return wrapped


def _no_luck(*_: object) -> None:
    raise ValueError("no luck")


CHANGES: dict[str, tuple[Callable[[Device], Wrapped], Callable[[Wrapped], object]]] = {
    "patch and the first step": (lambda device: Wrapped(device, patched=False), _patch_and_step),
    "unpatch after a forward that failed": (_after_forward, lambda wrapped: ddp_mp.unpatch(wrapped.ddp)),
    "unpatch while copies are made": (_after_prefetch, lambda wrapped: ddp_mp.unpatch(wrapped.ddp)),
    "unpatch and patch": (_after_step, lambda wrapped: (ddp_mp.unpatch(wrapped.ddp), _patch_and_step(wrapped))),
}
#: An engine that goes away asks whether its last casts are over, and has nobody to tell that it could not.
OF_AN_END = {"cuCtxPushCurrent", "cuEventQuery", "cuCtxPopCurrent"}


@pytest.mark.long
@on_ranks(1)
@pytest.mark.parametrize("name", CHANGES)
def test_fault_of_every_call_around_patching_surfaces(rank: Rank, name: str) -> None:
    prepare, act = CHANGES[name]
    with simulated_device() as device:
        expected = Wrapped(device, patched=True).step()
        made: list[Wrapped] = []

        def fresh() -> Wrapped:
            made[:] = [prepare(device)]
            return made[0]

        def verify() -> None:
            wrapped = made.pop()
            wrapped.ddp.state_dict()  # puts masters back where a forward left copies in place, as one without a fault does
            wrapped.require_masters()
            if not ddp_mp.is_patched(wrapped.ddp):
                wrapped.patch()
            for got, want in zip(wrapped.step(), expected, strict=True):
                assert torch.equal(got, want)
            ddp_mp.unpatch(wrapped.ddp)
            assert not ddp_mp.is_patched(wrapped.ddp)
            wrapped.require_masters()

        swallowed = sweep(device, fresh, act, verify, must=True)
        if name.startswith("unpatch"):
            swallowed = {call: nths for call, nths in swallowed.items() if call not in OF_AN_END or len(nths) > 1}
        assert not swallowed, f"errors that did not surface: {swallowed}"


# --- the root hook alone -------------------------------------------------------------------------------------------------


class RootBench(Bench):
    """PyTorch's own hooks do the rest, which do not get the first gradients right."""

    def warm_up(self) -> None:
        square_step(self.ddp, torch.zeros(4, 8))
        self.trial.zero_grad()
        self.step()


ROOT_ACTIONS: dict[str, Action] = {
    "forward": (NOTHING, forward),
    "forward and backward": (NOTHING, lambda bench, _: mean_square(bench.ddp, bench.x).backward()),
    "full_precision": (lambda bench: bench.ddp(bench.x), use_full_precision),
    "state_dict": (lambda bench: bench.ddp(bench.x), lambda bench, _: bench.ddp.state_dict()),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@on_ranks(1)
@pytest.mark.parametrize("name", ROOT_ACTIONS)
def test_fault_of_every_call_of_the_root_hook_surfaces(rank: Rank, name: str) -> None:
    with simulated_device() as device, device_of_pytorch(device):
        sweep_of(RootBench(rank, device, hooks="root"), *ROOT_ACTIONS[name], must=True)


# --- opening -------------------------------------------------------------------------------------------------------------

OPENING = """
import os, sys, warnings
import torch, torch.distributed as dist
from simulator.bridge import Bridge
from simulator.driver import Driver
from simulator.fixtures import load
from simulator.sim import Schedule
sim = load()
sim.reset(Schedule.LAZY)
import ddp_mp
from ddp_mp import _C
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method="file://" + os.path.join(sys.argv[1], "store"), rank=0, world_size=1)
_C.simulate_cuda(True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
masters = [p.detach().clone() for p in model.parameters()]
x = torch.randn(4, 8)
ddp = torch.nn.parallel.DistributedDataParallel(model)
def act():
    ddp_mp.patch(ddp, mixed_precision=ddp_mp.MixedPrecision(torch.bfloat16, torch.float32))
    ddp(x)
def require_masters():
    ddp.state_dict()
    for p, master in zip(model.parameters(), masters, strict=True):
        assert p.dtype is torch.float32 and torch.equal(p.detach(), master)
failed, nth = {}, 0
driver = Driver(sim.functions)
driver.start()
bridge = Bridge(sim, driver.stream())
bridge.__enter__()
bridge.adopt(*model.parameters(), *masters, x)
while True:
    sim.begin(Schedule.LAZY)
    # At first by name: looking names up has another way when it fails.
    sim.fault("*" if failed else "cuInit", max(nth, 1), 719)
    nth += 1
    try:
        act()
    except _C.DeviceError as error:
        text = str(error)
        name = text.split()[0]
        assert name.startswith("cu") and text.endswith(", device 0"), text
        assert " failed: CUDA_ERROR_LAUNCH_FAILED (719): " in text, text
        failed[name] = failed.get(name, 0) + 1
        if name == "cuDeviceGetCount":
            nth = 2  # the driver is initialised from now on, so that this call is the first
        require_masters()
    else:
        break
    assert sim.report() == [], sim.report()
    assert nth < 300
sim.begin(Schedule.LAZY)
require_masters()
ddp(x).float().sum().backward()
require_masters()
assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
print(sorted(failed))
sim.synchronize()
assert sim.report() == [], sim.report()
bridge.__exit__(None, None, None)
dist.destroy_process_group()
"""


OPENING_CALLS = (
    *("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
    *("cuCtxPushCurrent", "cuStreamCreateWithPriority", "cuModuleLoadData"),
    *("cuModuleGetFunction", "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuCtxPopCurrent"),
)


@pytest.mark.long
def test_fault_of_every_call_of_opening_a_device_surfaces(tmp_path: Path) -> None:
    failed = program(OPENING, tmp_path)
    for name in OPENING_CALLS:
        assert f"'{name}'" in failed, (name, failed)
