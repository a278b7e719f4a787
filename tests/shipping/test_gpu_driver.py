"""The driver of `make gpu`: whatever a step does, the others run and all that is known is kept."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap import common, figures, united

ROOT = Path(__file__).parents[2]
#: Steps for a driver in a process of its own: the first one is what a test chooses, and leaves a file.
DRIVER = """
import runpy, sys
from pathlib import Path
gpu = runpy.run_path({driver!r}, run_name="gpu")
results = Path(sys.argv[1])
first = "open({left!r}, 'w').write('kept'); print('begun', flush=True); " + sys.argv[2]
def python(code):
    return lambda place: [place.python, "-c", code]
steps = [gpu["Step"]("build", "?", (20, 20), python("")), gpu["Step"]("first", "?", (int(sys.argv[3]),) * 2, python(first)),
         gpu["Step"]("second", "?", (20, 20), python("print('second')"))]
place = gpu["Place"](sys.executable, True, results)
sys.exit(gpu["run_steps"](gpu["Run"](place, {{"device": "none"}}, 60), steps))
"""


@pytest.fixture
def gpu() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "gpu.py"), run_name="gpu")


class Driven:
    """A run of the driver with three steps."""

    def __init__(self, folder: Path, first: str, seconds: int = 20) -> None:
        self.results, self.out = folder / "results", folder / "out"
        self.results.mkdir()
        code = DRIVER.format(driver=str(ROOT / "scripts" / "gpu.py"), left=str(self.results / "left.json"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.results), first, str(seconds)],
            env={**os.environ, "OUT": str(self.out)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ended(self) -> tuple[int, str]:
        """Exit status and what was printed."""
        printed, _ = self.process.communicate(timeout=100)
        return self.process.returncode, printed

    def when_begun(self) -> None:
        """Returns when the first step is at work."""
        for _ in range(600):
            log = self.results / "first.log"
            if log.exists() and "begun" in log.read_text():
                return
            time.sleep(0.1)
        raise AssertionError("the first step did not begin")

    def statuses(self) -> dict[str, str]:
        """By the summary that was packed into OUT, which is that of the results."""
        text = (self.out / "summary.json").read_text()
        assert text == (self.results / "summary.json").read_text()
        return {step["name"]: step["status"] for step in json.loads(text)["steps"]}

    def packed(self) -> set[str]:
        with tarfile.open(self.out / "gpu.tgz") as archive:
            return {Path(name).name for name in archive.getnames()}


def test_steps_that_pass_are_kept_and_packed(tmp_path: Path) -> None:
    run = Driven(tmp_path, "pass")
    code, printed = run.ended()
    assert code == 0, printed
    assert run.statuses() == dict.fromkeys(("build", "first", "second"), "passed")
    assert {"left.json", "first.log", "second.log", "summary.txt", "summary.json"} <= run.packed()
    assert "rehearsal without a GPU" in (run.out / "summary.txt").read_text()
    steps = json.loads((run.out / "summary.json").read_text())["steps"]
    assert steps[1]["printed"] == ["begun"]
    assert steps[1]["files"] == ["first.log", "left.json"]


@pytest.mark.parametrize(
    ("does", "status", "why"),
    [
        ("raise SystemExit(3)", "failed", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "exit status -9"),
        ("import time; time.sleep(100)", "stopped", "after the 6 s"),
        ("import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(100)", "stopped", "after the 6 s"),
    ],
)
@pytest.mark.long
def test_step_that_ends_badly_loses_nothing_and_the_next_one_runs(tmp_path: Path, does: str, status: str, why: str) -> None:
    run = Driven(tmp_path, does, 6)
    code, printed = run.ended()
    assert code == 1, printed
    assert run.statuses() == {"build": "passed", "first": status, "second": "passed"}
    assert f"== first: {status} ({why}" in printed
    assert "left.json" in run.packed()


@pytest.mark.long
def test_step_that_hangs_says_where(tmp_path: Path) -> None:
    run = Driven(tmp_path, "\ndef waits():\n import time; time.sleep(100)\nwaits()", 6)
    run.ended()
    assert "in waits" in (run.results / "first.log").read_text()


@pytest.mark.long
def test_children_of_a_step_that_hangs_end_with_it(tmp_path: Path) -> None:
    child = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True); import time; time.sleep(100)"
    run = Driven(tmp_path, child, 6)
    run.ended()
    pid = int((run.results / "first.log").read_text().splitlines()[1])
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_driver_that_is_killed_has_kept_the_steps_before(tmp_path: Path, number: signal.Signals) -> None:
    run = Driven(tmp_path, "import time; time.sleep(8)")
    run.when_begun()
    run.process.send_signal(number)
    run.ended()
    expected = {"build": "passed", "first": "stopped"} if number == signal.SIGTERM else {"build": "passed"}
    assert run.statuses() == expected
    assert ("left.json" in run.packed()) == (number == signal.SIGTERM)


def test_without_a_build_nothing_else_is_run(gpu: dict[str, Any], tmp_path: Path) -> None:
    place = gpu["Place"](sys.executable, True, tmp_path)
    run = gpu["Run"](place, {}, 60)
    steps = [
        gpu["Step"](name, "?", (20, 20), lambda place: [place.python, "-c", "raise SystemExit(1)"]) for name in ("build", "x")
    ]
    assert gpu["run_steps"](run, steps) == 1
    assert [(o.status, o.why) for o in run.outcomes] == [("failed", "exit status 1"), ("not run", "there is no build")]


def test_steps_that_have_no_time_left_are_named(gpu: dict[str, Any], tmp_path: Path) -> None:
    run = gpu["Run"](gpu["Place"](sys.executable, True, tmp_path), {}, 1)
    gpu["run_steps"](run, gpu["STEPS"][:2])
    assert {o.why for o in run.outcomes} == {"no time was left", "there is no build"}


def test_missing_tool_is_no_failure(gpu: dict[str, Any], tmp_path: Path) -> None:
    def missing(_: object) -> list[str]:
        raise gpu["UnavailableError"]("no such tool")

    run = gpu["Run"](gpu["Place"](sys.executable, True, tmp_path), {}, 60)
    assert gpu["run_steps"](run, [gpu["Step"]("memcheck", "?", (20, 20), missing)]) == 0
    assert (run.outcomes[0].status, run.outcomes[0].why) == ("not run", "no such tool")


def test_steps_fit_the_time_up_to_the_compiler(gpu: dict[str, Any]) -> None:
    """Every step up to `compile` has all of its time, even when each one hangs; the others have what is left."""
    names = [step.name for step in gpu["STEPS"]]
    needed = gpu["STEPS"][: names.index("compile") + 1]
    assert sum(step.seconds[0] for step in needed) <= gpu["SECONDS"]
    assert names[0] == "build"
    assert len(set(names)) == len(names)


def test_page_has_every_step_with_its_seconds(gpu: dict[str, Any]) -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\d+) \|", (ROOT / "docs" / "gpu.md").read_text())
    assert rows == [(step.name, str(step.seconds[0])) for step in gpu["STEPS"]]


def test_machine_without_a_gpu_is_an_error_that_names_the_rehearsal() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "scripts" / "gpu.py"), "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
    assert "make gpu REHEARSE=1" in done.stderr


# --- the figures of a trace ----------------------------------------------------------------------------------------------


def test_intervals_are_united_and_intersected() -> None:
    assert united([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert common([(0, 10)], [(2, 4), (3, 5), (9, 12)]) == 4
    assert common([(0, 1)], [(1, 2)]) == 0


def kernel(name: str, stream: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": stream}}


def test_figures_of_a_trace_tell_casts_from_packs_and_hidden_from_bare() -> None:
    events = [
        kernel("gemm", 7, 0, 10),
        kernel("mp_cast", 20, 5, 10),  # half of it beside the product
        kernel("mp_cast", 7, 30, 5),  # a pack: on a stream where others run
        {"cat": "cpu_op", "name": "mp_cast", "ts": 0, "dur": 99},
    ]
    assert figures(events) == {"casts": 1, "packs": 1, "cast us": 10, "hidden us": 5, "waiting us": 5, "kernels": 3}
