"""A rank of the tests with a CUDA device: the extension's CUDA backend on the simulated driver, PyTorch through the bridge.

    with simulated_device(Schedule.LAZY) as device:
        trial = DeviceTrial(rank, model, device)
        trial.train(...)

What is inside runs as a device would run it in that schedule.  At the end the driver must have nothing to report, and
nothing but the pools of the device may have grown.  The device stays open in the process, as it does in real life.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from simulator.autograd import device_thread
from simulator.bridge import Bridge
from simulator.build import UnavailableError, library
from simulator.driver import Driver
from simulator.fixtures import load
from simulator.sim import Schedule, Simulator
from torch.utils._python_dispatch import _disable_current_modes

from kit.inside import _C
from kit.oracle import Trial

#: Every schedule that replays, RANDOM with two seeds, and the one with a thread.
SCHEDULES = {
    "eager": (Schedule.EAGER, 1),
    "lazy": (Schedule.LAZY, 1),
    "random1": (Schedule.RANDOM, 1),
    "random2": (Schedule.RANDOM, 2),
    "thread": (Schedule.THREAD, 1),
}

#: What lives in pools that grow to the most that was in use at one time.
POOLED = {"events", "device", "pinned"}


def require_simulator() -> None:
    """Skips the test where there is no kernel image or no simulated driver; builds the driver where it is missing."""
    image = _C.build_info()["cuda_image"]
    if not image["size"]:
        pytest.skip(f"no kernel image: {image['note']}")
    try:
        library()
    except UnavailableError as error:
        pytest.skip(f"the simulated driver cannot be built: {error}")


@functools.cache
def _machine() -> tuple[Simulator, Driver, tuple[int, int, int, int]]:
    """The driver of this process, two streams of the user, the process group's, and that of its futures' callbacks."""
    sim = load()
    sim.begin()
    driver = Driver(sim.functions)
    driver.start()
    streams = driver.stream(), driver.stream(), driver.stream(), driver.stream()
    for stream, name in zip(streams, ("user", "other", "communication", "callbacks"), strict=True):
        sim.name_stream(stream, name)
    return sim, driver, streams


class Device:
    """The simulated device while a test uses it; ``stream`` is the user's current stream, not the default one."""

    def __init__(self) -> None:
        self.sim, self.driver, (self.stream, self.other, communication, callbacks) = _machine()
        self.bridge = Bridge(self.sim, self.stream, communication, callbacks)
        self._event = self.driver.event()
        self._known: list[tuple[str, ...]] = []

    def order(self, later: int, after: int) -> None:
        """``later.wait_stream(after)``."""
        self.driver.cuEventRecord(self._event, after)
        self.driver.cuStreamWaitEvent(later, self._event, 0)

    def know(self, *parts: str) -> None:
        """A finding with these parts is known; it fails the test when it is not there any more."""
        self._known.append(parts)

    def unknown(self) -> list[str]:
        """What the driver has to report, but for what is known."""
        report = self.sim.report()
        for parts in self._known:
            known = [line for line in report if all(part in line for part in parts)]
            assert known, f"nothing with {parts} is reported any more"
            report = [line for line in report if line not in known]
        return report

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """The user's ``tensor.record_stream(stream)``."""
        self.bridge.record_stream(tensor, stream)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, the user's other stream is current; it is ordered after this one, and this one after it."""
        self.order(self.other, self.stream)
        with self.bridge.stream(self.other):
            yield
        self.order(self.stream, self.other)

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """Inside, PyTorch computes for the test and not on the device, whose results are all there."""
        self.sim.synchronize()
        with _disable_current_modes():
            yield

    def close(self) -> None:
        self.bridge.close()
        self.driver.cuEventDestroy(self._event)


@contextlib.contextmanager
def simulated_device(schedule: Schedule = Schedule.LAZY, seed: int = 1) -> Iterator[Device]:
    """Inside, CPU tensors are memory of CUDA device 0."""
    require_simulator()
    device = Device()
    sim = device.sim
    sim.begin(schedule, seed)
    sim.probe_gil()
    before = sim.leaks()
    _C.simulate_cuda(True)
    try:
        with device.bridge, device_thread(device.bridge):
            yield device
            gc.collect()
        sim.synchronize()
        found = device.unknown()
        assert not found, "\n".join(["the simulated driver reports:", *found])
        assert sim.gil_blocks() == 0, "the GIL was held in a call that waits for the device"
        grown = {kind: n - before.get(kind, 0) for kind, n in sim.leaks().items() if n > before.get(kind, 0)}
        if before.get("modules"):  # the device was open before
            assert not grown.keys() - POOLED, f"still alive: {grown}"
    finally:
        _C.simulate_cuda(False)
        device.close()
        sim.begin()


class DeviceTrial(Trial):
    """A :class:`Trial` on a simulated device: the model computes there, the oracle does not."""

    def __init__(self, rank: Any, module: Any, device: Device, *arguments: Any, **named: Any) -> None:
        self.device = device
        device.bridge.adopt(*module.parameters(), *module.buffers())
        super().__init__(rank, module, *arguments, **named)
        for name in ("backward", "zero_grad", "zero_grad_in_place"):
            setattr(self.oracle, name, self._on_host(getattr(self.oracle, name)))

    def _on_host(self, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            with self.device.host():
                return function(*arguments, **named)

        return call

    def check(self) -> None:
        with self.device.host():
            super().check()

    def oracle_step(self, optimizer: Any) -> None:
        with self.device.host():
            super().oracle_step(optimizer)
