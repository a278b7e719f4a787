#!/usr/bin/env python3
"""Does a test notice?  Takes waits, records and error checks out of the CUDA side one at a time, and runs tests.

    python scripts/mutate_cuda.py                     every mutant of the C code, a sample of the PTX; writes docs/mutation.md
    python scripts/mutate_cuda.py --sample 0          every mutant of the PTX too
    python scripts/mutate_cuda.py --only cuda/launch  the mutants whose place or description contains that; no report

A mutant of the C code is one call or one check less.  It is linked into the program tests/cuda/c, which runs the backend on
the simulated driver, and where that notices nothing into a copy of the extension, which trains on it.  A mutant of the kernel
is one instruction of its PTX made another; it runs over the rows of tests/kit/kernel_rows.py.  What is not mutated must pass
first.

Everything is made under build/mutation; the checkout stays as it is.  Verdicts are kept there by the text of the mutant, so
that a run that was interrupted goes on, and only what has changed is tried again.  A survivor is tried again when tests have
changed; `--fresh` forgets all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutation"
REPORT = ROOT / "docs" / "mutation.md"
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from cuda_equivalent import EQUIVALENT  # noqa: E402
from cuda_mutants import BACKEND, CALLERS, Mutant, architectures_of, mutants_of, ptx_mutants, ptx_of, sample_of  # noqa: E402
from kit.c_programs import build_command  # noqa: E402
from simulator.build import library, locked  # noqa: E402

CC = os.environ.get("CC", "gcc")
C_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-pthread", "-w", f"-I{ROOT / 'csrc'}"]
PROGRAM, KIT = ROOT / "tests" / "cuda" / "c", ROOT / "tests" / "kit" / "c"
#: What the program is made of, as paths below the root without their suffix: its own files, those of the kit, the backend.
PROGRAM_SOURCES = [word.removesuffix(".c") for word in build_command(PROGRAM / "main.c") if word.endswith(".c")]
LINKING = ("-pthread", "-Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc")
#: What the extension is tried with where the C program notices nothing: fast, and about order and errors.
TRAINING = [
    "cuda/test_simulated_calls.py",
    "cuda/test_simulated_faults.py",
    "unit/test_engine.py",
    "unit/test_event.py",
    "cuda/test_cuda_streams.py",
    "cuda/test_simulated_training.py",
    "-k",
    "not test_simulated_training"
    " or (1] and (many_buckets or by_module or streams or stream or prefetch or accumulation or error))",
]
#: Seconds after which a trial hangs; what is not mutated takes a tenth, on a machine that does nothing else.
HANGS = {"program": 240, "training": 900, "kernel": 60}


def run(command: Sequence[str | Path], seconds: float, **more: object) -> tuple[int, str]:
    """Exit status (124: it took too long) and output."""
    environment = os.environ | more.pop("environment", {})  # type: ignore[operator,arg-type]
    try:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, errors="replace", timeout=seconds,
            env=environment, **more,  # type: ignore[call-overload]
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout + done.stderr


def must(command: Sequence[str | Path], **more: object) -> str:
    code, text = run(command, 900, **more)
    if code:
        raise SystemExit(f"{' '.join(map(str, command))}\n{text}")
    return text


# --- verdicts ------------------------------------------------------------------------------------------------------------


def digest(*parts: str | bytes) -> str:
    return hashlib.sha256(b"\0".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()[:24]


def digest_of(files: Iterable[Path]) -> str:
    return digest(*(file.read_bytes() for file in sorted(files)))


class Verdicts:
    """What became of mutants in earlier runs, in a file that every trial writes anew."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: dict[str, dict[str, str | float]] = {}
        if fresh:
            path.unlink(missing_ok=True)
        self._read()
        simulator = list((ROOT / "tests" / "simulator" / "src").iterdir())
        program = [*PROGRAM.iterdir(), *KIT.iterdir()]
        python, rows = (ROOT / "tests").rglob("*.py"), ROOT / "tests" / "kit" / "kernel_rows.py"
        self._tests = {"c": digest_of([*python, *program, *simulator]), "ptx": digest_of([rows, *simulator])}

    def _read(self) -> None:
        if self._path.exists():
            self._known = json.loads(self._path.read_text())

    @staticmethod
    def _key(mutant: Mutant) -> str:
        return digest(mutant.stem, mutant.text)

    def _tests_of(self, mutant: Mutant) -> str:
        return self._tests["ptx" if mutant.stem.isdigit() else "c"]

    def recall(self, mutant: Mutant) -> bool:
        """Fills in what is known of the mutant; where it was not killed, only if the tests are still the same."""
        known = self._known.get(self._key(mutant))
        if known is None:
            return False
        if not str(known["verdict"]).startswith("killed") and known["tests"] != self._tests_of(mutant):
            return False
        mutant.verdict, mutant.seconds = str(known["verdict"]), float(known["seconds"])
        return True

    def keep(self, mutant: Mutant) -> None:
        """Writes down what became of the mutant."""
        entry: dict[str, str | float] = {"verdict": mutant.verdict, "seconds": round(mutant.seconds, 2)}
        with self._lock, locked(WORK):
            self._read()  # another run may have written meanwhile
            self._known[self._key(mutant)] = {**entry, "tests": self._tests_of(mutant), "place": mutant.place}
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(self._known, indent=1))
            os.replace(fresh, self._path)


# --- trials --------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What every trial needs: the simulated driver, the kernel image, objects to link with."""

    driver: Path = field(default_factory=Path)
    image: Path = WORK / "image"

    def prepare(self, extension: bool) -> None:
        """Builds what is not mutated."""
        WORK.mkdir(parents=True, exist_ok=True)
        self.driver = library()
        self._build_program()
        if extension:
            self._build_extension()
        else:
            self._find_image()

    def _build_program(self) -> None:
        jobs = [(ROOT / f"{source}.c", self._object(source)) for source in PROGRAM_SOURCES]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            includes = ["-I", ROOT / "tests" / "simulator", "-I", KIT]
            list(pool.map(lambda job: must([CC, *C_FLAGS, *includes, "-c", job[0], "-o", job[1]]), jobs))

    def _object(self, source: str) -> Path:
        return WORK / f"{source.replace('/', '-')}.o"

    def _link_program(self, target: Path, instead: dict[str, Path]) -> None:
        objects = [instead.get(source, self._object(source)) for source in PROGRAM_SOURCES]
        must([CC, *LINKING, *objects, "-ldl", "-lm", "-o", target])

    def _build_extension(self) -> None:
        folders = ["--build-temp", WORK / "temp", "--build-lib", WORK / "lib"]
        must(["env", "DDP_MP_TESTING=1", sys.executable, "setup.py", "build_ext", *folders], cwd=ROOT)
        shutil.copyfile(next((WORK / "temp").rglob("cuda_image.bin")), self.image)

    def _find_image(self) -> None:
        found = sorted((ROOT / "build").rglob("cuda_image.bin"), key=lambda p: p.stat().st_mtime)
        if found and found[-1].stat().st_size:
            shutil.copyfile(found[-1], self.image)
        else:
            self._build_extension()

    @property
    def environment(self) -> dict[str, str]:
        return {"DDP_MP_SIMCUDA": str(self.driver), "DDP_MP_IMAGE": str(self.image)}

    # C code

    def try_c(self, mutant: Mutant, training: bool = True) -> str:
        """Decides the verdict of a mutant of the C code; returns what failed."""
        folder = WORK / f"mutant-{digest(mutant.stem, mutant.text)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        source, made = folder / "mutant.c", folder / "mutant.o"
        source.write_text(mutant.text)
        include = [f"-I{sysconfig.get_paths()['include']}", '-DMP_VERSION="mutant"']
        code, output = run([CC, *C_FLAGS, *include, "-c", source, "-o", made], 120)
        mutant.verdict = "does not compile" if code else ""
        if not code and f"csrc/{mutant.stem}" in PROGRAM_SOURCES:
            code, output = self._run_program(folder, mutant.stem, made)
            mutant.verdict = told(code, "killed by test_cuda")
        if not code and training:
            code, output = self._run_training(folder, mutant.stem, made)
            mutant.verdict = told(code, "killed by training")
        if not code:
            mutant.verdict = "survived"
        shutil.rmtree(folder, ignore_errors=True)
        return output

    def _run_program(self, folder: Path, stem: str, made: Path) -> tuple[int, str]:
        self._link_program(folder / "test_cuda", {f"csrc/{stem}": made})
        code, output = run([folder / "test_cuda"], HANGS["program"])  # as on a machine without a driver
        if code:
            return code, output
        return run([folder / "test_cuda"], HANGS["program"], environment=self.environment)

    def _run_training(self, folder: Path, stem: str, made: Path) -> tuple[int, str]:
        package = folder / "site" / "ddp_mp"
        shutil.copytree(ROOT / "ddp_mp", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        objects = [p for p in (WORK / "temp").rglob("*.o") if not p.with_suffix("").as_posix().endswith(f"csrc/{stem}")]
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        must([CC, "-shared", "-pthread", *objects, made, "-o", package / f"_C{suffix}"])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
        command += [f"--basetemp={folder / 'tmp'}", "--timeout=200"]
        command += [str(ROOT / "tests" / part) if part.endswith(".py") else part for part in TRAINING]
        paths = {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
        return run(command, HANGS["training"], cwd=folder / "site", environment=paths)

    def expect_unchanged_to_pass(self, training: bool) -> None:
        """What is not mutated passes, in the very way that mutants are tried: else every verdict would be worthless."""
        same = Mutant("cuda/backend.c:0", "nothing", (ROOT / "csrc" / "cuda" / "backend.c").read_text(), "cuda/backend")
        output = self.try_c(same, training)
        if same.verdict != "survived":
            raise SystemExit(f"the code is {same.verdict} without any mutation, so nothing was tried:\n{output[-4000:]}")

    # PTX

    def run_rows(self, image: Path, architecture: str) -> int:
        """Runs a kernel over every kind of row; makes the expected result, or compares with it."""
        rows = [ROOT / "tests" / "kit" / "kernel_rows.py", image, architecture, WORK / "rows.npz"]
        return run([sys.executable, *rows], HANGS["kernel"], environment={"PYTHONPATH": str(ROOT / "tests")})[0]

    def try_ptx(self, mutant: Mutant) -> str:
        """Decides the verdict of a mutant of the kernel."""
        image = WORK / f"mutant-{digest(mutant.text)}.ptx"
        image.write_text(mutant.text)
        code = self.run_rows(image, mutant.stem)
        mutant.verdict = "does not load" if code == 2 else told(code, "killed") if code else "survived"
        image.unlink()
        return ""

    def expect_same_results(self) -> None:
        """All architectures' kernels, unchanged, must agree; what they agree on is what mutants are compared with."""
        (WORK / "rows.npz").unlink(missing_ok=True)
        for architecture, text in ptx_of(self.image.read_bytes()).items():
            whole = WORK / f"whole-{architecture}.ptx"
            whole.write_text(text)
            if self.run_rows(whole, str(architecture)):
                raise SystemExit(f"the kernel of sm_{architecture} differs from those before it without any mutation")


def told(code: int, killed: str) -> str:
    """The verdict of a trial that ended so."""
    return f"{killed}: hang" if code == 124 else killed


def judge(mutant: Mutant, trial: Callable[[Mutant], str], verdicts: Verdicts, final: bool = True) -> None:
    """Tries one, unless its verdict is known, and prints what became of it.  ``final``: there is nothing else to try."""
    if not verdicts.recall(mutant):
        started = time.monotonic()
        trial(mutant)
        mutant.seconds = time.monotonic() - started
        if final or mutant.verdict != "survived":
            verdicts.keep(mutant)
    print(f"{mutant.verdict:<20} {mutant.seconds:5.1f} s  {mutant.place}: {mutant.what}", flush=True)


# --- the report ----------------------------------------------------------------------------------------------------------

KINDS = ("killed", "of these: hang", "equivalent", "survived")


def reason(mutant: Mutant) -> str:
    """Why a mutant is equivalent, or "" where it is not known to be."""
    return EQUIVALENT.get(f"{mutant.place.partition(':')[0]}: {mutant.what}", "")


def counts(mutants: Sequence[Mutant]) -> tuple[int, int, int, int]:
    """How many of each of `KINDS`."""
    kinds = Counter("killed" if m.verdict.startswith("killed") else "equivalent" if reason(m) else "survived" for m in mutants)
    hung = sum(m.verdict.endswith("hang") for m in mutants)
    return kinds["killed"], hung, kinds["equivalent"], kinds["survived"]


def rate(mutants: Sequence[Mutant]) -> float:
    """The part of the mutants that can be noticed which was."""
    killed, _, equivalent, _ = counts(mutants)
    return killed / max(1, len(mutants) - equivalent)


def summary(title: str, text: str, mutants: Sequence[Mutant]) -> list[str]:
    """Markdown: a table by file, and what was not killed."""
    tried = [m for m in mutants if not m.verdict.startswith("does not")]
    lines = [f"## {title}", "", text, "", f"| of | mutants | {' | '.join(KINDS)} |", "|---" * 6 + "|"]
    for name in dict.fromkeys(m.place.partition(":")[0] for m in tried):
        mine = [m for m in tried if m.place.startswith(f"{name}:")]
        lines.append(f"| {name} | {len(mine)} | " + " | ".join(map(str, counts(mine))) + " |")
    lines.append(f"| all | {len(tried)} | " + " | ".join(map(str, counts(tried))) + " |")
    lines += ["", f"Killed: {100 * rate(tried):.1f} % of those that are not equivalent.", ""]
    left = [m for m in tried if m.verdict == "survived"]
    lines += listed("Survived:", [f"{m.place}: {m.what}" for m in left if not reason(m)])
    lines += listed("Equivalent:", [f"{m.place}: {m.what}. {reason(m)}" for m in left if reason(m)])
    lines += listed("Not tried, as it does not compile or load:", [f"{m.place}: {m.what}" for m in mutants if m not in tried])
    return lines


def listed(title: str, items: Sequence[str]) -> list[str]:
    return [title, "", *(f"- {item}" for item in items), ""] if items else []


HEADER = """# Mutation report

Written by `scripts/mutate_cuda.py` (`make mutate`). A mutant is the code of the CUDA side with one thing removed or
changed. It is killed when a test fails or hangs. It is equivalent when no test could tell it from the code, for a reason that
`scripts/cuda_equivalent.py` states. The code does not check a call whose failure could only follow one that is reported
already, so that such calls have no mutants.
"""
C_TEXT = """Each wait and each event record is taken out; the result of each driver call is ignored; each test of a status or
of a driver's code, and each condition under which a function refuses, behaves as if nothing had failed. Tried with
the program in `tests/cuda/c`, then by training on the simulated driver."""
PTX_TEXT = """One instruction is changed into another: conditions, arithmetic, rounding, addresses, stores, jumps, constants.
Copies between registers, exact conversions and loads of parameters are left as they are. Tried with
`tests/kit/kernel_rows.py`. The image holds a text for each architecture; those named together differ in nothing
but the name: {texts}. {chosen}."""


def c_part(bench: Bench, options: argparse.Namespace, verdicts: Verdicts) -> list[Mutant]:
    """Tries the C code."""
    training = not options.no_training
    mutants = chosen([m for stem in (*BACKEND, *CALLERS) for m in mutants_of(stem)], options)
    bench.expect_unchanged_to_pass(training)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda mutant: judge(mutant, lambda m: bench.try_c(m, training), verdicts, training), mutants))
    return mutants


def ptx_part(bench: Bench, options: argparse.Namespace, verdicts: Verdicts) -> tuple[str, list[Mutant]]:
    """Tries the kernel; says also what was chosen."""
    bench.expect_same_results()
    wanted = {int(a) for a in options.architectures.split(",") if a}
    mutants, texts, there = [], [], 0
    for text, architectures in architectures_of(bench.image.read_bytes()).items():
        if wanted and not wanted & set(architectures):
            continue
        every = ptx_mutants(text, architectures[0])
        there += len(every)
        mutants += chosen(sample_of(every, options.sample), options)
        texts.append(" and ".join(f"sm_{a}" for a in architectures))
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda mutant: judge(mutant, bench.try_ptx, verdicts), mutants))
    what = f"All {there} were tried" if len(mutants) == there else f"Of {there}, {len(mutants)} were tried, chosen by chance"
    return PTX_TEXT.format(texts="; ".join(texts), chosen=what), mutants


def chosen(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    mine = [m for m in mutants if options.only in f"{m.place} {m.what}"]
    return mine[: options.limit] if options.limit else mine


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["c", "ptx", "all"], default="all")
    parser.add_argument("--only", default="", help="mutants whose place and description contain this")
    parser.add_argument("--limit", type=int, default=0, help="the first so many of them")
    parser.add_argument("--sample", type=int, default=200, help="PTX mutants to try of each text (0: all)")
    parser.add_argument("--architectures", default="", help="of the PTX, with commas; all unless given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-training", action="store_true", help="the C program alone")
    parser.add_argument("--no-report", action="store_true", help="leave docs/mutation.md as it is")
    parser.add_argument("--fresh", action="store_true", help="forget the verdicts of earlier runs")
    options = parser.parse_args()
    bench = Bench()
    bench.prepare(extension=options.part != "ptx" and not options.no_training)
    verdicts = Verdicts(WORK / "verdicts.json", options.fresh)
    sections, failed = [], False
    if options.part in ("c", "all"):
        mutants = c_part(bench, options, verdicts)
        sections += summary("C: waits, records and checks", C_TEXT, mutants)
        failed |= rate(mutants) < 1
    if options.part in ("ptx", "all"):
        text, mutants = ptx_part(bench, options, verdicts)
        sections += summary("PTX: one instruction of the kernel", text, mutants)
        failed |= rate(mutants) < 0.95
    print("\n".join(sections))
    whole = options.part == "all" and not (options.only or options.limit or options.architectures or options.no_training)
    if whole and not options.no_report:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text("\n".join([HEADER, *sections]).rstrip() + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
