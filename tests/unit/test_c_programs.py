"""The C programs of tests/unit/c: each is built and run plainly and under sanitizers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from kit.c_programs import CC, FLAGS, OPTIONS, ROOT, build_command, runner

PROGRAMS = sorted((Path(__file__).parent / "c").glob("*.c"))
#: Programs whose subject is shared between threads, or is meant to be.
THREADED = {"test_host", "test_deque", "test_plan"}
CASES = [
    pytest.param(program, flavour, id=f"{program.stem}-{flavour}")
    for program in PROGRAMS
    for flavour in FLAGS
    if flavour != "thread" or program.stem in THREADED
]


def test_programs_exist() -> None:
    assert PROGRAMS, "tests/unit/c holds no program"


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
