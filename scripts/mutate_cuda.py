#!/usr/bin/env python3
"""Does a test notice?  Takes waits, records and error checks out of the CUDA side one at a time, and runs tests.

    python scripts/mutate_cuda.py                     every mutant of the C code, a sample of the PTX; writes docs/mutation.md
    python scripts/mutate_cuda.py --part ptx --sample 500
    python scripts/mutate_cuda.py --only cuda_slot --limit 5 --no-report

A mutant of the C code is one call or one check less.  It is compiled into tests/c/test_cuda.c, which runs the backend on the
simulated driver, and where that notices nothing into a copy of the extension, which trains on it.  A mutant of the kernel
is one instruction of its PTX made another; it runs over the rows of tests/kernel_rows.py.

Everything is made under build/mutation; the checkout stays as it is.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutation"
REPORT = ROOT / "docs" / "mutation.md"
sys.path.insert(0, str(ROOT / "tests"))

from simcuda.build import library  # noqa: E402

CC = os.environ.get("CC", "gcc")
C_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-pthread", "-w", f"-I{ROOT / 'csrc'}"]
PROGRAM_SOURCES = ("backend", "backend_cuda", "cuda_driver", "cuda_module", "cuda_nvrtc", "cuda_slot", "cuda_table")
CASTS = ("cast", "cast_scalar", "cast_avx2", "cast_avx512", "cast_neon")
BACKEND = ("backend_cuda", "cuda_slot", "cuda_table", "cuda_module")
#: What the extension is tried with where the C program notices nothing: fast, and about order and errors.
TRAINING = [
    "test_simulated_calls.py",
    "test_simulated_training.py",
    "-k",
    "test_simulated_calls or (1] and (many_buckets or by_module or streams or stream or prefetch or accumulation or error))",
]

#: Mutants that no test can tell from the code, and why.  The key is how the report names them, without the line.
EQUIVALENT: dict[str, str] = {}


@dataclass
class Mutant:
    """One change, and what became of it."""

    place: str  # file:line
    what: str
    text: str  # the mutated file
    stem: str
    verdict: str = ""
    seconds: float = 0.0


# --- mutants of the C code -----------------------------------------------------------------------------------------------


def closing(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("unbalanced parentheses")


def arguments(text: str) -> list[str]:
    """Splits "(a, f(b, c), d)" at its own commas."""
    parts, depth, last = [], 0, 1
    for i, char in enumerate(text):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[last:i].strip())
            last = i + 1
            if depth == 0:
                break
    return parts


Change = tuple[int, int, str, str]  # start, end, replacement, what


def calls_and_results(code: str) -> Iterator[Change]:
    """Driver calls: waits and records taken out; the result of every call unchecked."""
    for found in re.finditer(r"\bMP_CUDA\(", code):
        end = closing(code, found.end() - 1)
        device, _, call, *given = arguments(code[found.end() - 1 : end])
        if call in ("cuStreamWaitEvent", "cuEventRecord"):
            yield found.start(), end, "MP_OK", f"{call} taken out"
        yield found.start(), end, f"((void)({device})->api->{call}({', '.join(given)}), MP_OK)", f"{call} unchecked"
    for found in re.finditer(r"(?<!^)\bmp_cuda_check\(", code, re.MULTILINE):
        end = closing(code, found.end() - 1)
        call = arguments(code[found.end() - 1 : end])[1]
        yield found.start(), end, "MP_OK", f"{call.strip(chr(34))} unchecked"


def ordering(code: str) -> Iterator[Change]:
    """What the engine asks of a backend for the sake of order."""
    for found in re.finditer(r"\bself->backend->(order_after|event_record|event_wait|event_synchronize|synchronize)\(", code):
        yield found.start(), closing(code, found.end() - 1), "MP_OK", f"{found[1]} taken out"


def checks(code: str) -> Iterator[Change]:
    """Tests of a status: as if nothing had failed."""
    for found in re.finditer(r"\b(status|code|found) (!=|==) (MP_OK|CU_OK)\b", code):
        yield found.start(), found.end(), "0" if found[2] == "!=" else "1", f"'{found[0]}' never fails"
    for found in re.finditer(r"\((status = )", code):
        end = closing(code, found.start())
        if tail := re.match(r" != MP_OK", code[end:]):
            call = re.search(r"(\w+),|(\w+)\(", code[found.end() :])
            name = arguments(code[code.index("(", found.end()) :])[2:3] if call else []
            replaced = f"((void){code[found.start() : end]}, 0)"
            yield found.start(), end + tail.end(), replaced, f"status of {(name or ['a call'])[0]} never fails"


def mutants_of(stem: str) -> list[Mutant]:
    """Every mutant of one file."""
    code = (ROOT / "csrc" / f"{stem}.c").read_text()
    kinds = [calls_and_results, checks] if stem in BACKEND else [ordering, checks]
    made = []
    for kind in kinds:
        for start, end, replacement, what in kind(code):
            lines = code[start:end].count("\n")  # later lines keep their numbers
            text = code[:start] + replacement + "\n" * lines + code[end:]
            place = f"{stem}.c:{code.count(chr(10), 0, start) + 1}"
            made.append(Mutant(place, what, text, stem))
    return sorted(made, key=lambda m: int(m.place.rpartition(":")[2]))


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
        jobs = [(ROOT / "csrc" / f"{stem}.c", WORK / f"{stem}.o") for stem in PROGRAM_SOURCES + CASTS]
        jobs.append((ROOT / "tests" / "c" / "test_cuda.c", WORK / "test_cuda.o"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            includes = ["-I", ROOT / "tests" / "simcuda"]
            list(pool.map(lambda job: must([CC, *C_FLAGS, *includes, "-c", job[0], "-o", job[1]]), jobs))
        self.link_program(WORK / "test_cuda", {})

    def link_program(self, target: Path, instead: dict[str, Path]) -> None:
        objects = [instead.get(stem, WORK / f"{stem}.o") for stem in (*PROGRAM_SOURCES, *CASTS, "test_cuda")]
        must([CC, "-pthread", *objects, "-ldl", "-lm", "-o", target])

    def _build_extension(self) -> None:
        python = sys.executable
        folders = ["--build-temp", WORK / "temp", "--build-lib", WORK / "lib"]
        must([python, "setup.py", "build_ext", *folders], cwd=ROOT)
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

    # --- one mutant ------------------------------------------------------------------------------------------------------

    def try_c(self, mutant: Mutant, number: int, training: bool = True) -> None:
        """Decides the verdict of a mutant of the C code."""
        started = time.monotonic()
        folder = WORK / f"mutant-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        source, made = folder / f"{mutant.stem}.c", folder / f"{mutant.stem}.o"
        source.write_text(mutant.text)
        include = [f"-I{sysconfig.get_paths()['include']}", '-DMP_VERSION="mutant"']
        code, text = run([CC, *C_FLAGS, *include, "-c", source, "-o", made], 120)
        if code:
            mutant.verdict = f"does not compile: {text.splitlines()[0] if text else code}"
        elif mutant.stem in BACKEND and self._program_fails(folder, mutant.stem, made):
            mutant.verdict = "killed by test_cuda"
        elif training and self._training_fails(folder, mutant.stem, made):
            mutant.verdict = "killed by training"
        else:
            mutant.verdict = "survived"
        mutant.seconds = time.monotonic() - started
        shutil.rmtree(folder, ignore_errors=True)

    def _program_fails(self, folder: Path, stem: str, made: Path) -> bool:
        self.link_program(folder / "test_cuda", {stem: made})
        return run([folder / "test_cuda"], 240, environment=self.environment)[0] != 0

    def _training_fails(self, folder: Path, stem: str, made: Path) -> bool:
        package = folder / "site" / "ddp_mp"
        shutil.copytree(ROOT / "ddp_mp", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        objects = [path for path in (WORK / "temp").rglob("*.o") if path.stem != stem]
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        must([CC, "-shared", "-pthread", *objects, made, "-o", package / f"_C{suffix}"])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
        command += [f"--basetemp={folder / 'tmp'}", "--timeout=200"]
        command += [str(ROOT / "tests" / part) if part.endswith(".py") else part for part in TRAINING]
        paths = {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
        return run(command, 600, cwd=folder / "site", environment=paths)[0] != 0

    def run_rows(self, image: Path, architecture: str) -> int:
        """Runs a kernel over every kind of row; makes the expected result, or compares with it."""
        rows = [ROOT / "tests" / "kernel_rows.py", image, architecture, WORK / "rows.npy"]
        return run([sys.executable, *rows], 60)[0]

    def try_ptx(self, mutant: Mutant, number: int) -> None:
        """Decides the verdict of a mutant of the kernel."""
        started = time.monotonic()
        image = WORK / f"mutant-{number}.ptx"
        image.write_text(mutant.text)
        mutant.verdict = "killed" if self.run_rows(image, mutant.stem) else "survived"
        mutant.seconds = time.monotonic() - started
        image.unlink()


# --- mutants of the kernel -----------------------------------------------------------------------------------------------


def ptx_of(image: bytes) -> dict[int, str]:
    """The PTX of a fat binary by architecture.  The format is undocumented; see tests/simcuda/src/fatbin.hpp."""
    texts = {}
    header, size = struct.unpack_from("<H", image, 6)[0], struct.unpack_from("<Q", image, 8)[0]
    at = header
    while at < header + size:
        kind, _, head, payload = struct.unpack_from("<HHIQ", image, at)
        if kind == 1:
            architecture = struct.unpack_from("<I", image, at + 28)[0]
            texts[architecture] = image[at + head : at + head + payload].rstrip(b"\0").decode()
        at += head + payload
    return texts


#: What becomes of an instruction, by its name; the first that changes it is taken.
SWAPS = [
    (r"^@%p", "@!%p"),
    (r"^@!%p", "@%p"),
    (r"^(setp|set)\.lt", r"\1.le"), (r"^(setp|set)\.le", r"\1.lt"), (r"^(setp|set)\.gt", r"\1.ge"),
    (r"^(setp|set)\.ge", r"\1.gt"), (r"^(setp|set)\.eq", r"\1.ne"), (r"^(setp|set)\.ne", r"\1.eq"),
    (r"^(setp|set)\.(lo|ls|hi|hs)", r"\1.ne"), (r"^(setp|set)\.(\w+)u\b", r"\1.\2"),
    (r"^add\.(s|u)(\d+)", r"sub.\1\2"), (r"^sub\.(s|u)(\d+)", r"add.\1\2"), (r"^add\.(rn\.)?f", r"sub.\1f"),
    (r"^sub\.(rn\.)?f", r"add.\1f"), (r"^mul\.(rn\.)?f(\d+)", r"add.f\2"), (r"^mul\.lo\.(\w+)", r"add.\1"),
    (r"^div\.rn\.f(\d+)", r"mul.f\1"), (r"^min", "max"), (r"^max", "min"), (r"^shl\.b(\d+)", r"shr.u\1"),
    (r"^shr\.(u|s|b)(\d+)", r"shl.b\2"), (r"^and\.b", "or.b"), (r"^or\.b", "and.b"), (r"^xor\.b", "or.b"),
    (r"^(selp\.\w+\s+%\w+), ([^,]+), ([^,]+),", r"\1, \3, \2,"),
    (r"^cvt\.rn\.(bf16|f16)", r"cvt.rz.\1"),
    (r"^(ld\.global\S*|st\.global\S*)(.*)\[(%\w+)\+(\d+)\]", lambda m: f"{m[1]}{m[2]}[{m[3]}+{int(m[4]) // 2}]"),
    (r"^(mov\.b(?:32|64)\s+)\{(%\w+), ?(%\w+)\}", r"\1{\3, \2}"),
    (r"^(mov\.b(?:32|64)\s+%\w+), \{(%\w+), ?(%\w+)\}", r"\1, {\3, \2}"),
    (r"^st\.global.*", "// taken out"),
    (r"^(mov\.\w+\s+%\w+), (-?\d+)$", lambda m: f"{m[1]}, {int(m[2]) + 1}"),
    (r"^((?:mad|mul)\.\S+\s+.*), (\d+)(?=[,;])", lambda m: f"{m[1]}, {int(m[2]) + 1}"),
    (r"^mad\.lo\.(\w+)\s+(%\w+), ([^,]+), ([^,]+), ([^,;]+)", r"mad.lo.\1 \2, \3, \4, 0"),
]  # fmt: skip


def mutate_instruction(line: str) -> str | None:
    """Another instruction, or None where no rule applies."""
    body = line.strip().rstrip(";")
    for pattern, replacement in SWAPS:
        changed = re.sub(pattern, replacement, body, count=1)  # type: ignore[arg-type]
        if changed != body:
            return changed + ("" if changed.startswith("//") else ";")
    return None


def ptx_mutants(image: bytes, architectures: Sequence[int]) -> list[Mutant]:
    """Every mutant of the kernel for some architectures."""
    made = []
    for architecture, text in ptx_of(image).items():
        if architecture not in architectures:
            continue
        lines = text.split("\n")
        for number, line in enumerate(lines):
            changed = mutate_instruction(line)
            if changed is None or not line.strip().endswith(";") or line.strip().startswith("."):
                continue
            mutated = "\n".join([*lines[:number], changed, *lines[number + 1 :]])
            what = f"`{line.strip()}` becomes `{changed}`"
            made.append(Mutant(f"sm_{architecture}.ptx:{number + 1}", what, mutated, str(architecture)))
    return made


# --- the report ----------------------------------------------------------------------------------------------------------


def summary(title: str, mutants: Sequence[Mutant]) -> list[str]:
    """Markdown: a table by file, and what survived."""
    lines = [f"## {title}", "", "| of | mutants | killed | equivalent | survived |", "|---|---|---|---|---|"]
    tried = [m for m in mutants if not m.verdict.startswith("does not compile")]
    for name in dict.fromkeys(m.place.partition(":")[0] for m in tried):
        mine = [m for m in tried if m.place.startswith(name + ":")]
        lines.append(f"| {name} | " + " | ".join(map(str, counts(mine))) + " |")
    total = counts(tried)
    lines.append("| all | " + " | ".join(map(str, total)) + " |")
    rate = 100 * total[1] / max(1, total[0] - total[2])
    lines += ["", f"Killed: {rate:.1f} % of those that are not equivalent.", ""]
    for m in tried:
        if m.verdict == "survived":
            why = reason(m)
            lines.append(f"- {m.place}: {m.what}" + (f". Equivalent: {why}" if why else ". **Survived.**"))
    return [*lines, ""]


def reason(mutant: Mutant) -> str:
    """Why a mutant is equivalent, or "" where it is not known to be."""
    key = f"{mutant.stem}: {mutant.what}"
    return next((why for part, why in EQUIVALENT.items() if part in key or part in f"{mutant.place} {mutant.what}"), "")


def counts(mutants: Sequence[Mutant]) -> tuple[int, int, int, int]:
    verdicts = Counter(
        "killed" if m.verdict.startswith("killed") else "equivalent" if reason(m) else "survived" for m in mutants
    )
    return len(mutants), verdicts["killed"], verdicts["equivalent"], verdicts["survived"]


HEADER = """# Mutation report

Written by `make mutate`. Each mutant is one wait, record, check or kernel instruction less or other; `killed` means that a
test failed. Calls whose failure comes after another failure, which is the one to tell, are not checked in the code either.
"""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["c", "ptx", "all"], default="all")
    parser.add_argument("--only", default="", help="mutants whose place and description contain this")
    parser.add_argument("--limit", type=int, default=0, help="the first so many of them")
    parser.add_argument("--sample", type=int, default=300, help="PTX mutants to try (0: all)")
    parser.add_argument("--architectures", default="75,80,90")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-training", action="store_true", help="the C program alone")
    parser.add_argument("--no-report", action="store_true", help="leave docs/mutation.md as it is")
    options = parser.parse_args()
    bench = Bench()
    bench.prepare(extension=options.part != "ptx" and not options.no_training)

    def chosen(mutants: list[Mutant]) -> list[Mutant]:
        mine = [m for m in mutants if options.only in f"{m.place} {m.what}"]
        return mine[: options.limit] if options.limit else mine

    sections, left = [], 0
    if options.part in ("c", "all"):
        mutants = chosen([m for stem in (*BACKEND, "engine_pass") for m in mutants_of(stem)])
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda job: tell(job[1], bench.try_c, job[0], not options.no_training), enumerate(mutants)))
        sections += summary("C: waits, records and checks", mutants)
        left += counts(mutants)[3]
    if options.part in ("ptx", "all"):
        expect_same_results(bench)
        mutants = chosen(ptx_mutants(bench.image.read_bytes(), [int(a) for a in options.architectures.split(",")]))
        if options.sample and len(mutants) > options.sample:
            mutants = sorted(random.Random(1).sample(mutants, options.sample), key=lambda m: m.place)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda job: tell(job[1], bench.try_ptx, job[0]), enumerate(mutants)))
        sections += summary("PTX: one instruction of the kernel", mutants)
        total = counts(mutants)
        left += 100 * total[1] < 95 * (total[0] - total[2])
    print("\n".join(sections))
    if not options.no_report:
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text("\n".join([HEADER, *sections]))
    return int(left > 0)


def expect_same_results(bench: Bench) -> None:
    """All architectures' kernels, unchanged, must agree; what they agree on is what mutants are compared with."""
    (WORK / "rows.npy").unlink(missing_ok=True)
    for architecture, text in ptx_of(bench.image.read_bytes()).items():
        whole = WORK / f"whole-{architecture}.ptx"
        whole.write_text(text)
        if bench.run_rows(whole, str(architecture)):
            raise SystemExit(f"the kernel of sm_{architecture} differs from those before it without any mutation")


def tell(mutant: Mutant, judge: object, number: int, *more: object) -> None:
    """Tries one and prints what became of it."""
    judge(mutant, number, *more)  # type: ignore[operator]
    print(f"{mutant.verdict:<20} {mutant.seconds:5.1f} s  {mutant.place}: {mutant.what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
