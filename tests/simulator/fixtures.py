"""pytest fixtures over the simulated driver.

A test module of the extension takes them with ``from simulator.fixtures import ...`` in its conftest.  Every fixture ends
by checking that the report is empty and that nothing is alive which was not alive before.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .build import UnavailableError, library
from .driver import Driver
from .sim import Schedule, Simulator

# Every schedule that replays, RANDOM with a few seeds, and the one with real concurrency.
SCHEDULES = [
    pytest.param((Schedule.EAGER, 1), id="eager"),
    pytest.param((Schedule.LAZY, 1), id="lazy"),
    pytest.param((Schedule.RANDOM, 1), id="random1"),
    pytest.param((Schedule.RANDOM, 2), id="random2"),
    pytest.param((Schedule.RANDOM, 3), id="random3"),
    pytest.param((Schedule.THREAD, 1), id="thread"),
]

_loaded: list[Simulator] = []


def load() -> Simulator:
    """The simulator of this process, built and loaded at the first call.  Raises `UnavailableError`."""
    if not _loaded:
        _loaded.append(Simulator(library()))
    return _loaded[0]


class Checked:
    """A test's view of the simulator: what it expects to be wrong is taken out of the report by `expect`."""

    def __init__(self, simulator: Simulator, schedule: Schedule, seed: int) -> None:
        self.simulator, self.schedule, self.seed = simulator, schedule, seed
        self._expected: list[str] = []
        self._may_leak: set[str] = set()

    def __getattr__(self, name: str) -> object:
        return getattr(self.simulator, name)

    def expect(self, *parts: str) -> str:
        """Asserts that a finding contains all the parts, and accepts every such finding; returns the first."""
        found = [line for line in self.simulator.report() if all(part in line for part in parts)]
        assert found, f"no finding with {parts}; the report is {self.simulator.report()}"
        self._expected += found
        return found[0]

    def allow_leaks(self, *kinds: str) -> None:
        """Objects of these kinds may stay, as in a pool that lives as long as the process."""
        self._may_leak.update(kinds)

    def unexpected(self) -> list[str]:
        return [line for line in self.simulator.report() if line not in self._expected]

    def leaks_since(self, before: dict[str, int]) -> dict[str, int]:
        now = self.simulator.leaks()
        return {k: n for k, n in now.items() if n > before.get(k, 0) and k not in self._may_leak}


def _simulator_or_skip() -> Simulator:
    try:
        return load()
    except UnavailableError as error:
        pytest.skip(f"the simulated driver cannot be built: {error}")


def _finish(checked: Checked, before: dict[str, int]) -> None:
    unexpected, leaks = checked.unexpected(), checked.leaks_since(before)
    checked.simulator.begin()
    assert not unexpected, "\n".join(["the simulator reports:", *unexpected])
    assert not leaks, f"still alive: {leaks}"


@pytest.fixture(scope="session")
def simulator() -> Simulator:
    """The simulator itself, without any check."""
    return _simulator_or_skip()


@pytest.fixture(params=SCHEDULES)
def sim(request: pytest.FixtureRequest, simulator: Simulator) -> Iterator[Checked]:
    """A fresh driver under every schedule.  Handles of earlier tests are dead: not for code that keeps a device open."""
    schedule, seed = request.param
    simulator.reset(schedule, seed)
    checked = Checked(simulator, schedule, seed)
    yield checked
    _finish(checked, {})


@pytest.fixture(params=SCHEDULES)
def sim_device(request: pytest.FixtureRequest, simulator: Simulator) -> Iterator[Checked]:
    """The driver under every schedule for code that opens a device once a process: objects stay, findings do not."""
    schedule, seed = request.param
    before = simulator.leaks()
    simulator.begin(schedule, seed)
    checked = Checked(simulator, schedule, seed)
    yield checked
    _finish(checked, before)


@pytest.fixture
def cu(simulator: Simulator) -> Driver:
    """The driver API."""
    return Driver(simulator.functions)
