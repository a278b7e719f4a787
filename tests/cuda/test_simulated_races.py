"""A wait that ddp_mp must not lose is taken away, and the simulated device must say so; a steady step waits nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.inside import Communicator
from kit.modules import mlp, vectors
from kit.oracle import BF16
from kit.ranks import Rank, on_ranks
from kit.simulated import Device, DeviceTrial, require_simulator, simulated_device
from simulator.sim import Schedule

from ddp_mp import MixedPrecision


@pytest.fixture(autouse=True, scope="module")
def _simulator() -> None:
    require_simulator()


def found(device: Device, *parts: str) -> bool:
    """Whether there is a race that names all parts; the report is not looked at again."""
    device.bridge.synchronize()
    report = device.sim.report()
    device.sim.begin(Schedule.LAZY)
    return any(line.startswith("RACE") and all(part in line for part in parts) for line in report)


def train(rank: Rank, device: Device, steps: int = 3, **options: Any) -> DeviceTrial:
    """Steps whose values nobody looks at."""
    trial = DeviceTrial(rank, mlp(), device, MixedPrecision(BF16, BF16), options=options)
    optimizer = torch.optim.SGD(trial.module.parameters(), lr=0.1)
    for _ in range(steps):
        trial.ddp(vectors()()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return trial


@on_ranks(1)
def test_missing_wait_for_a_reduction_is_found(rank: Rank) -> None:
    with simulated_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "wait", lambda self, pending: pending.buffer)
        train(rank, device)
        assert found(device, "allreduce_", "communication")


@on_ranks(1)
def test_steady_steps_wait_nowhere_for_the_device(rank: Rank) -> None:
    with simulated_device() as device:
        trial = train(rank, device)
        with device.bridge.no_syncs():
            trial.ddp(vectors()()).float().square().mean().backward()
        assert device.sim.queue_full() == 0
