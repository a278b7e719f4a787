"""Builds the simulated driver: ``python tests/simulator/build.py`` prints where it is.

Needs a C++17 compiler and the headers of a CUDA toolkit, no GPU and no driver.  Objects and libraries go into
``build/simcuda``; only what is out of date is made again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
OUTPUT = HERE.parent.parent / "build" / "simcuda"
NAME = "libcuda.so.1"

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Werror"]
# nodelete: handles and the background thread outlive a dlclose.  The soname makes a later dlopen("libcuda.so.1") of the
# code under test find this library when it was loaded first.
LINKING = ["-shared", "-pthread", f"-Wl,-soname,{NAME}", "-Wl,-z,nodelete", "-Wl,-z,defs"]


class UnavailableError(RuntimeError):
    """The simulator cannot be built here; the text says what is missing."""


def toolkit() -> Path:
    """The root of a CUDA toolkit with headers."""
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if found := shutil.which("nvcc"):
        places.append(os.path.dirname(os.path.dirname(os.path.realpath(found))))
    places.append("/usr/local/cuda")
    for place in places:
        if place and os.path.isfile(os.path.join(place, "include", "cuda.h")):
            return Path(place)
    raise UnavailableError("no CUDA toolkit: cuda.h was found neither in CUDA_HOME nor next to nvcc")


def nvcc() -> str:
    """The CUDA compiler, which only the simulator's own tests need."""
    path = os.pathsep.join([str(toolkit() / "bin"), os.environ.get("PATH", os.defpath)])
    if found := shutil.which("nvcc", path=path):
        return found
    raise UnavailableError("no nvcc in the CUDA toolkit")


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        raise UnavailableError(f"no C++ compiler '{name}'")
    return name


def compile_flags(sanitize: str) -> list[str]:
    flags = ["-std=c++17", "-fPIC", "-g", "-pthread", *WARNINGS, f"-I{toolkit() / 'include'}", f"-I{HERE}"]
    if sanitize:
        return [*flags, "-O1", f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    return [*flags, "-O2"]


def run(command: Sequence[str]) -> None:
    # A sanitizer's runtime that is preloaded for the tests would make the compiler crawl.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time, also between processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def newest(files: Iterable[Path]) -> float:
    return max(file.stat().st_mtime for file in files)


def newest_header() -> float:
    return newest([*SOURCES.glob("*.hpp"), HERE / "simcuda.h"])


def is_fresh(target: Path) -> bool:
    return target.exists() and target.stat().st_mtime > max(newest(SOURCES.glob("*.cpp")), newest_header())


def compile_stale(folder: Path, flags: list[str]) -> list[Path]:
    """Every object file, those out of date made again."""
    headers = newest_header()
    jobs, objects = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        target = folder / f"{source.stem}.o"
        objects.append(target)
        if not target.exists() or target.stat().st_mtime <= max(source.stat().st_mtime, headers):
            jobs.append([compiler(), *flags, "-c", str(source), "-o", str(target)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs))
    return objects


def version_script(hide: Sequence[str]) -> str:
    """What the library exports: the driver and the control surface, without ``hide``."""
    hidden = "".join(f" {name};" for name in hide)
    return f"{{ global: cu*; sim_*; local:{hidden} *; }};\n"


def library(sanitize: str | None = None, hide: Sequence[str] = ()) -> Path:
    """Builds the simulated ``libcuda.so.1`` if needed.

    ``hide`` names exported symbols that shall be missing, as in an old driver, for dlsym too; cuGetProcAddress alone
    can be told by ``sim_hide``.  ``sanitize`` is that of the environment variable SIMCUDA_SANITIZE unless given.  Raises
    `UnavailableError` where it cannot be built.
    """
    sanitize = os.environ.get("SIMCUDA_SANITIZE", "") if sanitize is None else sanitize
    flags = compile_flags(sanitize)
    # Other flags, another folder: two builds that take turns would never be fresh.
    folder = OUTPUT / f"{sanitize.replace(',', '-') or 'plain'}-{digest(compiler(), flags)}"
    place = folder / (f"without-{digest(sorted(hide))}" if hide else "lib")
    target = place / NAME
    if is_fresh(target):
        return target
    with locked(folder):
        objects = compile_stale(folder, flags)
        place.mkdir(exist_ok=True)
        script, linked = place / "exports", place / "new"
        script.write_text(version_script(hide))
        # A sanitizer's runtime is found in the process only when it runs.
        options = [f"-fsanitize={sanitize}", "-Wl,-z,undefs"] if sanitize else []
        run([compiler(), *LINKING, *options, f"-Wl,--version-script={script}", *map(str, objects), "-o", str(linked)])
        os.replace(linked, target)
    return target


def fatbin(source: Path, arches: Sequence[int], options: Sequence[str] = ()) -> Path:
    """Compiles kernels as the project does: uncompressed, PTX next to every cubin."""
    folder = OUTPUT / "kernels"
    target = folder / f"{source.stem}-{digest(nvcc(), source.read_text(), arches, options)}.fatbin"
    with locked(folder):
        if not target.exists():
            codes = [f"-gencode=arch=compute_{a},code=[sm_{a},compute_{a}]" for a in arches]
            fresh = folder / f"{target.name}.new"
            run([nvcc(), "-O3", "--fatbin", "--compress-mode=none", *codes, *options, str(source), "-o", str(fresh)])
            os.replace(fresh, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", help="address,undefined or thread")
    parser.add_argument("--hide", default="", help="exported symbols that shall be missing, with commas")
    arguments = parser.parse_args()
    try:
        print(library(arguments.sanitize, [name for name in arguments.hide.split(",") if name]))
    except UnavailableError as error:
        print(f"the simulated driver cannot be built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
