"""The fixtures: a finding or a leak that nobody expected fails the test."""

from __future__ import annotations

import pytest

from .fixtures import Checked, _finish
from .sim import Range, Schedule

pytestmark = pytest.mark.long


@pytest.fixture
def checked(simulator, cu) -> Checked:
    simulator.reset(Schedule.LAZY)
    cu.start()
    return Checked(simulator, Schedule.LAZY, 1)


def test_unexpected_finding_fails_the_test(checked, cu):
    cu.code("cuStreamDestroy", 1)
    with pytest.raises(AssertionError, match="MISUSE: cuStreamDestroy"):
        _finish(checked, checked.leaks())


def test_expected_finding_is_accepted_and_others_are_not(checked, cu):
    cu.code("cuStreamDestroy", 1)
    cu.code("cuEventDestroy", 1)
    checked.expect("MISUSE", "cuStreamDestroy")
    with pytest.raises(AssertionError, match=r"reports:\nMISUSE: cuEventDestroy[^\n]*$"):
        _finish(checked, checked.leaks())


def test_finding_that_is_missing_fails_the_test(checked):
    with pytest.raises(AssertionError, match="no finding"):
        checked.expect("RACE")


def test_leak_fails_the_test_unless_its_kind_is_allowed(checked, cu):
    before = checked.leaks()
    cu.cuEventCreate(2)
    with pytest.raises(AssertionError, match=r"still alive: \{'events': 1\}"):
        _finish(checked, before)
    checked.allow_leaks("events")
    _finish(checked, before)


@pytest.fixture(scope="module")
def process_wide(simulator, cu_module) -> int:
    """A stream that stays open, as the extension's does."""
    simulator.reset()
    cu_module.start()
    return cu_module.stream()


@pytest.fixture(scope="module")
def cu_module(simulator):
    from .driver import Driver

    return Driver(simulator.functions)


def test_objects_of_the_process_survive_from_test_to_test(process_wide, sim_device, cu):
    sim_device.work(process_wide, [Range(4096, 0)], "work")
    cu.cuStreamSynchronize(process_wide)
    assert sim_device.leaks() == {"contexts": 1, "streams": 1}
