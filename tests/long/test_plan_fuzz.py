"""tests/unit/c/fuzz_plan.c for longer than its short form, which test_c_programs.py runs: ``DDP_MP_FUZZ=<minutes>``.

With clang and its libFuzzer the inputs are those that run new code, else they are random.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from kit.c_programs import CC, FLAGS, ROOT, build_command

PROGRAM = ROOT / "tests" / "unit" / "c" / "fuzz_plan.c"
MINUTES = float(os.environ.get("DDP_MP_FUZZ", "0"))


def command_for(binary: Path, seconds: int) -> list[str]:
    """Builds the program, and says how to run it for so long."""
    words = [*build_command(PROGRAM), *FLAGS["address"]]
    guided = ["clang", *words, "-fsanitize=fuzzer", "-DLIBFUZZER", "-o", str(binary)]
    if shutil.which("clang") and subprocess.run(guided, cwd=ROOT, capture_output=True).returncode == 0:
        return [str(binary), f"-max_total_time={seconds}", "-max_len=2048", "-print_final_stats=1"]
    subprocess.run([CC, *words, "-o", str(binary)], cwd=ROOT, check=True)
    return [str(binary), str(seconds), str(time.time_ns())]


@pytest.mark.skipif(not MINUTES, reason="the short form is run by test_c_programs.py")
@pytest.mark.timeout(60 * MINUTES + 300)
def test_plan_of_any_numbers_keeps_its_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_for(tmp_path / "fuzz_plan", int(60 * MINUTES))
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    text = result.stdout + result.stderr
    with capsys.disabled():
        print("\n" + "\n".join(line for line in text.splitlines() if "inputs:" in line or line.startswith("stat::number")))
    assert result.returncode == 0, text[-6000:]
