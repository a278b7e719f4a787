"""An acceptance harness on the simulated device: the runner itself, and the harness that ``DDP_MP_ACCEPTANCE`` names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.simulated import require_simulator
from simulated_acceptance import HARNESS

ROOT = Path(__file__).parents[2]
#: A harness whose scenarios are right, or wrong in each way that is to be noticed.
OWN = """
import multiprocessing, os, torch
from ddp_mp import _C

def engine():
    master, low = torch.ones(64), torch.zeros(64, dtype=torch.bfloat16)
    made = _C.Engine([master], ["weight"], [({"weight": master}, "weight", 0)], "bfloat16", 1 << 20, 1 << 20)
    made.bind([master], [low], None)
    made.cast()
    return made, low

def good(run):
    made, low = engine()
    made.wait()
    assert float(low.sum()) == 64

def wrong(run):
    made, low = engine()
    made.wait()
    assert float(low.sum()) == 65

def race(run):
    made, low = engine()
    low + 1

def idle(run):
    torch.ones(3) + 1

kept = []

def leak(run):
    good(run)
    from kit.simulated import _machine
    kept.append(_machine()[1].stream())

def load(path):
    return {f.__name__: f for f in (good, wrong, race, idle, leak)}

def one(name):
    try:
        load(None)[name](None)
        print("ok", name, flush=True)
    except BaseException as error:
        print("FAIL", name, " ".join(str(error).split())[:200], flush=True)
    os._exit(0)

def main():
    for name in load(None):
        process = multiprocessing.get_context("fork").Process(target=one, args=(name,))
        process.start()
        process.join()
    return 0
"""


def run(harness: Path, schedule: str, seconds: float, *more: str) -> subprocess.CompletedProcess[str]:
    require_simulator()
    command = [sys.executable, str(ROOT / "tests" / "long" / "simulated_acceptance.py"), "--harness", str(harness), *more]
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "tests")]))  # under PYTHONSAFEPATH too
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [*command, "--schedule", schedule], cwd=ROOT, capture_output=True, text=True, timeout=seconds, env=environment
    )


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
def test_runner_of_an_acceptance_harness_notices_what_is_wrong(schedule: str, tmp_path: Path) -> None:
    harness = tmp_path / "harness.py"
    harness.write_text(OWN)
    done = run(harness, schedule, 200)
    lines = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert lines["good"] == "ok good", done.stdout + done.stderr
    assert lines["wrong"].startswith("FAIL")
    assert "RACE" in lines["race"]
    assert "no kernel was launched" in lines["idle"]
    assert "still alive: {'streams': 1" in lines["leak"]


def test_runner_without_a_harness_says_so(tmp_path: Path) -> None:
    done = run(tmp_path / "none.py", "eager", 100)
    assert done.returncode == 2
    assert "there is no harness" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random1", "thread"])
def test_acceptance_harness_passes_on_the_simulated_device(schedule: str) -> None:
    if not os.environ.get("DDP_MP_ACCEPTANCE"):
        pytest.skip("minutes a schedule: DDP_MP_ACCEPTANCE asks for it, and names a harness")
    done = run(HARNESS, schedule, 880, "--seconds", "150")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 failed" in done.stdout
