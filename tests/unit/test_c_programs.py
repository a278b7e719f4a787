"""The C programs of tests/unit/c, a file or a folder with a main.c each, built and run plainly and under sanitizers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from kit.c_programs import CC, FLAGS, OPTIONS, ROOT, build_command, runner

FOLDER = Path(__file__).parent / "c"
#: By name.  That of a folder begins like those of the files.
PROGRAMS = {path.stem: path for path in sorted(FOLDER.glob("*.c"))} | {
    f"test_{path.parent.name}": path for path in sorted(FOLDER.glob("*/main.c"))
}
#: Programs whose subject is shared between threads, or is meant to be.
THREADED = {"test_host", "test_plan"}
#: Programs that take a while under a sanitizer.
LONG = {"test_host", "test_cast"}
CASES = [
    pytest.param(program, flavour, id=f"{name}-{flavour}", marks=[pytest.mark.long] * (name in LONG and flavour != "plain"))
    for name, program in PROGRAMS.items()
    for flavour in FLAGS
    if flavour != "thread" or name in THREADED
]


def test_programs_exist() -> None:
    assert PROGRAMS.keys() >= THREADED, "tests/unit/c lacks a program"


@pytest.mark.parametrize(("program", "flavour"), CASES)
def test_program_runs_clean(program: Path, flavour: str, tmp_path: Path) -> None:
    prefix = runner(flavour)
    if prefix is None:
        pytest.skip(f"{CC} has no runtime for {FLAGS[flavour][0]} here")
    binary = tmp_path / program.stem
    command = [CC, *build_command(program), *FLAGS[flavour], "-o", str(binary)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, f"{shlex.join(command)}\n{built.stderr}"
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | OPTIONS
    result = subprocess.run([*prefix, str(binary)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
