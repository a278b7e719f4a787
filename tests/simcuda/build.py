"""Builds the simulated driver: ``python tests/simcuda/build.py`` prints where it is.

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
from collections.abc import Iterator, Sequence
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
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time, also between processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def newest_header() -> float:
    return max(file.stat().st_mtime for file in [*SOURCES.glob("*.hpp"), HERE / "simcuda.h", Path(__file__)])


def compile_stale(folder: Path, flags: list[str]) -> list[Path]:
    """Every object file, those out of date made again."""
    headers = newest_header()
    stamp = folder / ("flags-" + hashlib.sha256(" ".join([compiler(), *flags]).encode()).hexdigest()[:16])
    fresh_flags = stamp.exists()
    jobs, objects = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        target = folder / f"{source.stem}.o"
        objects.append(target)
        made = target.stat().st_mtime if fresh_flags and target.exists() else 0.0
        if made <= max(source.stat().st_mtime, headers):
            jobs.append([compiler(), *flags, "-c", str(source), "-o", str(target)])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, jobs))
    for old in folder.glob("flags-*"):
        old.unlink()
    stamp.touch()
    return objects


def version_script(hide: Sequence[str]) -> str:
    """What the library exports: the driver and the control surface, without ``hide``."""
    hidden = "".join(f" {name};" for name in hide)
    return f"{{ global: cu*; sim_*; local:{hidden} *; }};\n"


def library(sanitize: str = "", hide: Sequence[str] = ()) -> Path:
    """Builds the simulated ``libcuda.so.1`` if needed.

    ``hide`` names exported symbols that shall be missing, as in an old driver, for dlsym too; cuGetProcAddress alone
    can be told by ``sim_hide``.  Raises `UnavailableError` where it cannot be built.
    """
    folder = OUTPUT / (sanitize.replace(",", "-") or "plain")
    place = folder / ("without-" + hashlib.sha256(",".join(sorted(hide)).encode()).hexdigest()[:8] if hide else "lib")
    target = place / NAME
    flags = compile_flags(sanitize)
    with locked(folder):
        objects = compile_stale(folder, flags)
        if target.exists() and target.stat().st_mtime >= max(o.stat().st_mtime for o in objects):
            return target
        place.mkdir(exist_ok=True)
        script, fresh = place / "exports", place / "new"
        script.write_text(version_script(hide))
        sanitizer = [f"-fsanitize={sanitize}"] if sanitize else []
        definitions = [] if not sanitize else ["-Wl,-z,undefs"]
        run([compiler(), *LINKING, *definitions, *sanitizer, f"-Wl,--version-script={script}", *map(str, objects),
             "-o", str(fresh)])  # fmt: skip
        os.replace(fresh, target)
    return target


def fatbin(source: Path, arches: Sequence[int], options: Sequence[str] = ()) -> Path:
    """Compiles kernels as the project does: uncompressed, PTX next to every cubin."""
    key = hashlib.sha256(f"{source.read_text()}{arches}{options}".encode()).hexdigest()[:16]
    folder = OUTPUT / "kernels"
    target = folder / f"{source.stem}-{key}.fatbin"
    with locked(folder):
        if not target.exists():
            codes = [f"-gencode=arch=compute_{a},code=[sm_{a},compute_{a}]" for a in arches]
            fresh = folder / f"{target.name}.new"
            run([nvcc(), "-O3", "--fatbin", "--compress-mode=none", *codes, *options, str(source), "-o", str(fresh)])
            os.replace(fresh, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
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
