"""Runs an acceptance harness on the simulated device: the same scenarios, computed by the CUDA backend.

    python tests/long/simulated_acceptance.py --schedule lazy                        all scenarios
    python tests/long/simulated_acceptance.py --schedule random1 --only a,b          some; other arguments are the harness's own
    python tests/long/simulated_acceptance.py --harness ../elsewhere/harness.py ...

A harness is a program with ``main()``, whose ranks are forked and look a scenario up in ``load(path)``, a dictionary of
functions.  Each is run inside :func:`simulated_device`: a wrong gradient fails it as ever, and so do a race, a leak, the GIL
held in a call that waits, and a scenario in which the device did nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests, where the kit is

import torch
from kit.inside import _C
from kit.simulated import SCHEDULES, Device, require_simulator, simulated_device

#: Where a harness is looked for: what the variable says, else beside the checkout.
HARNESS = Path(os.environ.get("DDP_MP_ACCEPTANCE") or Path(__file__).parents[3] / "shared" / "acceptance" / "harness.py")


def open_device() -> None:
    """Before the scenario, so that whatever is alive after it and was not before is a leak."""
    with simulated_device() as device:
        source, target = torch.ones(8), torch.zeros(8, dtype=torch.bfloat16)
        device.bridge.adopt(source, target)
        _C.cast(source, target)


def require_used(device: Device) -> None:
    """A scenario that never reached the device shows nothing."""
    assert device.sim.calls("cuLaunchKernel"), "no kernel was launched"


def on_the_device(schedule: str, scenario: Callable[[Any], None], run: Any) -> None:
    """The scenario as a device in that schedule runs it."""
    open_device()
    with simulated_device(*SCHEDULES[schedule]) as device:
        scenario(run)
        require_used(device)


def load_harness(path: Path, schedule: str) -> ModuleType:
    """The harness, whose scenarios run on the simulated device."""
    spec = importlib.util.spec_from_file_location("harness", path)
    assert spec is not None
    assert spec.loader is not None
    harness = sys.modules["harness"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    load = harness.load

    def load_simulated(file: str) -> dict[str, Callable[[Any], None]]:
        return {name: functools.partial(on_the_device, schedule, scenario) for name, scenario in load(file).items()}

    harness.load = load_simulated
    return harness


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="lazy")
    parser.add_argument("--harness", type=Path, default=HARNESS)
    options, rest = parser.parse_known_args()
    if not options.harness.exists():
        parser.error(f"there is no harness at {options.harness}: name one with --harness or DDP_MP_ACCEPTANCE")
    require_simulator()
    sys.argv = [str(options.harness), *rest]
    return int(load_harness(options.harness, options.schedule).main())


if __name__ == "__main__":
    sys.exit(main())
