"""Everything that needs an NVIDIA GPU, in ten minutes and with nobody watching: ``make gpu``.

    python3 scripts/gpu.py                          on a machine with a GPU
    python3 scripts/gpu.py --rehearse               the same steps without one: tiny sizes, on the CPU and the simulated driver
    python3 scripts/gpu.py --only bandwidth,train   some of the steps, after the build
    python3 scripts/gpu.py --list                   the steps, what each answers and how long it may take

The steps run in the order of what their answers are worth.  Each has seconds of its own, and is stopped when they are over;
the later ones go on.  After every step everything known so far is written: ``summary.txt`` and ``summary.json``, what the step
printed, and the files that it left, all in ``benchmarks/results/gpu-<device>``.  Where the variable OUT names a folder they are
there too, the first two as they are and the whole as ``gpu.tgz``.

Needs Python with a PyTorch that can use the GPU, setuptools, a C compiler and pytest; no network, and no other package.  Where
nvcc is not found, the driver's own compiler makes the kernels.  The exit status is 0 when no step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRATCH = ROOT / "build" / "gpu"
#: Seconds for everything, where nothing else is said: somewhat less than the ten minutes that such a machine is often lent for.
SECONDS = 570
#: A step is not begun with less than this.
LEAST = 5

#: Asks an interpreter what it has.  The last line of what it prints is the answer.
PROBE = """
import json, platform, re, sys, torch
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda, "device": None}
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory GiB": round(properties.total_memory / 2**30, 1),
    }
print(json.dumps(found))
"""


class UnavailableError(Exception):
    """A step cannot run here; the text says why."""


# --- the steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the steps run."""

    python: str
    rehearse: bool
    results: Path

    def benchmark(self, name: str, *more: str) -> list[str]:
        device = ["--device", "cpu", "--quick"] if self.rehearse else ["--device", "cuda"]
        return [self.python, "-m", f"benchmarks.{name}", *device, "--output", str(self.results), *more]

    def tests(self, chosen: str, *more: str) -> list[str]:
        """The chosen ones of those that need a device."""
        # -v: of a step that is ended, the log names every test that was run.
        options = ["-p", "no:cacheprovider", "-v", "-rs", "--durations=5", "-m", "gpu"]
        if not self.rehearse:
            options += ["-o", "timeout=40"]
        return [self.python, "-m", "pytest", *options, "-k", chosen, *more, TESTS]


@dataclass(frozen=True)
class Step:
    """One thing to run, what it answers, and how many seconds it may take: on a GPU, and in a rehearsal.

    A rehearsal may run on a busy machine: its seconds only end what hangs.
    """

    name: str
    answers: str
    seconds: tuple[int, int]
    command: Callable[[Place], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    lines: int = 12  # of what it printed, in the summary


TESTS = "tests/cuda/test_gpu.py"
#: What is asked of a device first.
FIRST = "(cast_kernel and not beyond_32_bits) or equals_masters_by_hand or captured"


def toolkit_program(name: str) -> str:
    """A program of the CUDA toolkit, which is often not on PATH."""
    places = [os.environ.get("PATH", os.defpath)]
    places += [os.path.join(os.environ[home], "bin") for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    if found := shutil.which(name, path=os.pathsep.join([*places, "/usr/local/cuda/bin"])):
        return found
    raise UnavailableError(f"{name} is not installed")


def build(place: Place) -> list[str]:
    program = "scripts/build_in_place.py"
    if place.rehearse and stand_in() == "simulated":  # the simulated driver now: a test that has to build it first may time out
        return ["sh", "-c", f'"$0" {program} && "$0" tests/simulator/build.py', place.python]
    return [place.python, program]


def memcheck(place: Place) -> list[str]:
    test = place.tests("any_bits and bfloat16-torch.float32", "-x")
    if place.rehearse:
        return test
    errors = ["--error-exitcode", "9", "--report-api-errors", "no"]  # PyTorch asks the driver for more than it has
    return [toolkit_program("compute-sanitizer"), "--tool", "memcheck", *errors, "--target-processes", "all", *test]


def upstream(place: Place) -> list[str]:
    device = "cpu" if place.rehearse else "cuda"
    return [place.python, "examples/compare.py", "--device", device, "--json", str(place.results / "upstream.json")]


def everyday_casts(place: Place) -> list[str]:
    return place.benchmark("cast", *([] if place.rehearse else ["--models", "resnet50,gpt2"]))


STEPS = (
    Step(
        "build",
        "Does the extension build here, and with kernels for this GPU?",
        (90, 900),
        build,
    ),
    Step(
        "info",
        "What is this machine, and what of it does the extension use?",
        (20, 200),
        lambda place: [place.python, "-m", "ddp_mp", "info"],
        lines=40,
    ),
    Step(
        "first",
        "Are casts right bit by bit, does training give the gradients of masters by hand, and can a step be captured?",
        (60, 600),
        lambda place: place.tests(FIRST),
    ),
    Step(
        "bandwidth",
        "How near do casts and packing come to a copy?",
        (60, 400),
        lambda place: place.benchmark("bandwidth"),
        lines=60,
    ),
    Step(
        "train",
        "What does a step of GPT-2 take in time and memory, here and in every alternative?",
        (110, 400),
        lambda place: place.benchmark("train"),
        lines=40,
    ),
    Step(
        "overlap",
        "Do casts run beside other kernels?",
        (40, 400),
        lambda place: place.benchmark("overlap"),
        lines=20,
    ),
    Step(
        "upstream",
        "What do PyTorch's own mixed precision hooks do on this device?",
        (30, 400),
        upstream,
        lines=40,
    ),
    Step(
        "tests",
        "Do all tests that need a device pass?",
        (100, 600),
        lambda place: place.tests("not compiled"),
        lines=30,
    ),
    Step(
        "compile",
        "Does torch.compile work on a patched model, with CUDA graphs too?",
        (60, 600),
        lambda place: place.tests("compiled"),
    ),
    Step(
        "variants",
        "Are casts and packing faster with other grids, chunks or kernels?",
        (90, 600),
        lambda place: place.benchmark("variants"),
        lines=60,
    ),
    Step(
        "memcheck",
        "Does compute-sanitizer find an access outside of memory?",
        (60, 400),
        memcheck,
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # the caching allocator would hide an overrun
    ),
    Step(
        "casts",
        "What bandwidth do single tensors from 4 KiB to 2 GiB have?",
        (60, 400),
        everyday_casts,
        lines=60,
    ),
)


# --- running one ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a step."""

    name: str
    answers: str
    status: str = "not run"  # "passed", "failed", "stopped" or "not run"
    why: str = ""
    seconds: float = 0.0
    printed: list[str] = field(default_factory=list)  # its last lines
    files: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A few lines that say it."""
        said = f" ({self.why})" if self.why else ""
        head = f"== {self.name}: {self.status}{said}, {self.seconds:.0f} s\n   {self.answers}"
        return "\n".join([head, *self.printed])


class StoppedError(Exception):
    """This program was told to stop."""


class Running:
    """A process with all that it starts, which can be ended together."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def wait(self, seconds: float) -> int | None:
        """The exit status; None when it was still running after so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def end(self) -> None:
        """Ends it and its children.  SIGABRT first: Python then prints where each thread is."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)
            self.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Run:
    """All steps of one run, and what is known of them."""

    def __init__(self, place: Place, machine: dict[str, Any], seconds: float) -> None:
        self.place, self.machine = place, machine
        self.end = time.monotonic() + seconds
        self.outcomes: list[Outcome] = []
        self.environment = environment_of(place)

    def step(self, step: Step) -> Outcome:
        """Runs a step; an exception means that the whole run is to stop, and the step's part is kept too."""
        outcome = Outcome(step.name, step.answers)
        self.outcomes.append(outcome)
        allowed = min(step.seconds[self.place.rehearse], self.end - time.monotonic())
        started = time.monotonic()
        before = self.files()
        try:
            self._run(step, outcome, allowed)
        except UnavailableError as error:
            outcome.why = str(error)
        except OSError as error:
            outcome.status, outcome.why = "failed", str(error)
        except StoppedError as error:
            outcome.status, outcome.why = "stopped", str(error)
            raise
        finally:
            outcome.seconds = round(time.monotonic() - started, 1)
            outcome.files = sorted(name for name, written in self.files().items() if before.get(name) != written)
            self._keep_lines(step, outcome)
            self.keep()
        return outcome

    def _run(self, step: Step, outcome: Outcome, allowed: float) -> None:
        if step.name != "build" and any(o.name == "build" and o.status != "passed" for o in self.outcomes):
            raise UnavailableError("there is no build")
        if allowed < LEAST:
            raise UnavailableError("no time was left")
        running = Running(step.command(self.place), {**self.environment, **step.environment}, self.log(step.name))
        try:
            code = running.wait(allowed)
        finally:
            running.end()
        if code is None:
            outcome.status, outcome.why = "stopped", f"after the {allowed:.0f} s that it had"
        else:
            outcome.status, outcome.why = ("passed", "") if code == 0 else ("failed", f"exit status {code}")

    def log(self, name: str) -> Path:
        return self.place.results / f"{name}.log"

    def files(self) -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in self.place.results.iterdir() if file.is_file()}

    def _keep_lines(self, step: Step, outcome: Outcome) -> None:
        with contextlib.suppress(OSError):
            text = self.log(step.name).read_text(errors="replace")
            outcome.printed = [line.rstrip() for line in text.splitlines() if line.strip()][-step.lines :]

    def text(self) -> str:
        """The summary."""
        what = "rehearsal without a GPU: no figure here means anything" if self.place.rehearse else "on a GPU"
        facts = ", ".join(f"{name}: {value}" for name, value in self.machine.items())
        verdicts = ", ".join(f"{o.name} {o.status}" for o in self.outcomes)
        return "\n".join([f"ddp_mp, {what}", facts, *(o.text() for o in self.outcomes), f"== {verdicts}"]) + "\n"

    def keep(self) -> None:
        """Writes what is known; a run that is killed after this loses nothing."""
        content = {
            "rehearsal": self.place.rehearse,
            "machine": self.machine,
            "steps": [dataclasses.asdict(outcome) for outcome in self.outcomes],
        }
        results = self.place.results
        replace(results / "summary.txt", self.text())
        replace(results / "summary.json", json.dumps(content, indent=1) + "\n")
        if out := os.environ.get("OUT"):
            try:
                pack(results, Path(out))
            except OSError as error:
                print(f"gpu: nothing could be written to OUT: {error}", file=sys.stderr)


def replace(file: Path, text: str) -> None:
    """Writes a file so that it is whole at any time."""
    new = file.with_name(f".{file.name}")
    new.write_text(text)
    os.replace(new, file)


def pack(results: Path, out: Path) -> None:
    """The results in another folder: the summary as it is, the whole as one file."""
    out.mkdir(parents=True, exist_ok=True)
    new = out / ".gpu.tgz"
    with tarfile.open(new, "w:gz") as archive:
        archive.add(results, arcname=results.name)
    os.replace(new, out / "gpu.tgz")
    for name in ("summary.txt", "summary.json"):
        shutil.copyfile(results / name, out / name)


def stand_in() -> str:
    """What tests have in place of a GPU: the simulated driver where it can be built, else the CPU."""
    with contextlib.suppress(UnavailableError):
        toolkit_program("nvcc")
        return "simulated" if shutil.which("g++") else "cpu"
    return "cpu"


def environment_of(place: Place) -> dict[str, str]:
    """What every step is started with."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
        "TORCHINDUCTOR_CACHE_DIR": str(SCRATCH / "inductor"),
        "TRITON_CACHE_DIR": str(SCRATCH / "triton"),
        "MPLCONFIGDIR": str(SCRATCH / "matplotlib"),
        **({"DDP_MP_TEST_DEVICE": stand_in()} if place.rehearse else {"DDP_MP_REQUIRE_GPU": "1"}),
    }


# --- the machine ---------------------------------------------------------------------------------------------------------


def probe(python: str) -> dict[str, Any]:
    """What an interpreter has.  Raises UnavailableError with the reason when it has no PyTorch."""
    try:
        asked = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{python}: {error}") from None
    if asked.returncode:
        raise UnavailableError(f"{python}: {(asked.stderr.strip().splitlines() or ['it failed'])[-1]}")
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return found


def choose(wanted: str | None, rehearse: bool) -> tuple[str, dict[str, Any]]:
    """The interpreter to use and what it has: the one that is asked for, else the first that will do."""
    reasons = []
    for python in [wanted] if wanted else [str(ROOT / ".venv" / "bin" / "python"), "python3", sys.executable]:
        try:
            found = probe(python)
        except UnavailableError as error:
            reasons.append(str(error))
            continue
        if rehearse or found["device"]:
            return python, found
        reasons.append(f"{python}: PyTorch {found['torch']} sees no GPU")
    needed = "PyTorch" if rehearse else "a PyTorch that sees a GPU"
    raise UnavailableError("\n".join([f"no Python here has {needed}", *reasons]))


def driver_version() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    return "unknown"


def fresh(folder: Path) -> Path:
    """An empty folder; what was there is moved aside."""
    if folder.exists():
        before = SCRATCH / f"{folder.name}-before"
        shutil.rmtree(before, ignore_errors=True)
        SCRATCH.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, before)
    folder.mkdir(parents=True)
    return folder


# --- the command ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside, a signal that ends programs raises StoppedError, so that what is known is written."""

    def stop(number: int, _: object) -> None:
        raise StoppedError(f"this program got {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_steps(run: Run, steps: Sequence[Step]) -> int:
    """Runs them in order; the exit status."""
    try:
        with stop_on_signals():
            for step in steps:
                print(run.step(step).text(), flush=True)
    except StoppedError as error:
        print(f"gpu: stopped: {error}", flush=True)
        return 1
    finally:
        print(f"== {', '.join(f'{o.name} {o.status}' for o in run.outcomes)}; results in {run.place.results}", flush=True)
    return int(any(outcome.status in ("failed", "stopped") for outcome in run.outcomes))


def names(text: str) -> list[str]:
    """The argument of ``--only``."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in {step.name for step in STEPS}]:
        raise argparse.ArgumentTypeError(f"no such step: {', '.join(unknown)}")
    return chosen


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at tiny sizes")
    parser.add_argument("--python", help="the interpreter to use, else that of .venv or python3, whichever sees a GPU first")
    parser.add_argument("--seconds", type=float, help=f"for everything; {SECONDS} on a GPU")
    parser.add_argument("--only", type=names, help="steps, with commas")
    parser.add_argument("--list", action="store_true", help="name the steps")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status, which is 2 where nothing could be run."""
    options = parse(arguments)
    if options.list:
        for step in STEPS:
            print(f"{step.name:<10} {step.seconds[0]:>4} s  {step.answers}")
        return 0
    try:
        python, machine = choose(options.python, options.rehearse)
    except UnavailableError as error:
        print(f"gpu: {error}\nnothing was run; `make gpu REHEARSE=1` runs every step without a GPU", file=sys.stderr)
        return 2
    machine = {"device": machine.pop("device") or "none", **machine, "driver": driver_version()}
    name = re.sub(r"[^a-z0-9]+", "-", str(machine["device"]).lower()).strip("-")
    results = SCRATCH / "rehearsal" if options.rehearse else ROOT / "benchmarks" / "results" / f"gpu-{name}"
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a step that is aborted leaves no image of its memory
    place = Place(python, options.rehearse, fresh(results))
    seconds = options.seconds or (sum(step.seconds[1] for step in STEPS) if options.rehearse else SECONDS)
    chosen = [step for step in STEPS if step.name == "build" or options.only is None or step.name in options.only]
    return run_steps(Run(place, machine, seconds), chosen)


if __name__ == "__main__":
    sys.exit(main())
