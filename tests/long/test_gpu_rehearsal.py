"""`make gpu REHEARSE=1` from a fresh clone, in this environment: every step of the run on a GPU, to its last line."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the clone after the rehearsal, with ``out`` beside it."""
    if not (ROOT / ".git").exists() or not shutil.which("git") or not shutil.which("make"):
        pytest.skip("needs git, make and a checkout that can be cloned")
    folder = tmp_path_factory.mktemp("rehearsal")
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True, timeout=100)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}
    environment |= {"OUT": str(folder / "out"), "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    command = ["make", "gpu", "REHEARSE=1", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=3500, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return clone


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_rehearsal_passes_every_step(rehearsed: Path) -> None:
    names = [step.name for step in runpy.run_path(str(ROOT / "scripts" / "gpu.py"), run_name="gpu")["STEPS"]]
    out = rehearsed.parent / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["rehearsal"] is True
    assert {step["name"]: step["status"] for step in summary["steps"]} == dict.fromkeys(names, "passed")
    assert (rehearsed / "build" / "gpu" / "rehearsal" / "summary.json").read_text() == (out / "summary.json").read_text()
    assert (out / "summary.txt").read_text().startswith("ddp_mp, rehearsal without a GPU")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_rehearsal_leaves_the_results_of_every_step(rehearsed: Path) -> None:
    def results(name: str) -> Any:
        return json.loads((rehearsed / "build" / "gpu" / "rehearsal" / name).read_text())

    for name in ("bandwidth", "train", "overlap", "cast"):
        assert results(f"{name}.json")["rows"], name
    assert not results("train.json")["notes"], "every variant trains on a CPU"
    assert all(case["ddp_mp"] == "right" for case in results("upstream.json")["cases"])
    with tarfile.open(rehearsed.parent / "out" / "gpu.tgz") as archive:
        packed = {Path(name).name for name in archive.getnames()}
    assert {"bandwidth.json", "train.json", "upstream.json", "trace-ddp_mp.json.gz", "first.log", "summary.txt"} <= packed
    status = subprocess.run(["git", "status", "--porcelain"], cwd=rehearsed, capture_output=True, text=True, check=True)
    assert status.stdout == "", "a rehearsal writes nothing that git would see"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_rehearsal_runs_tests_and_skips_only_what_asks_the_cuda_runtime(rehearsed: Path) -> None:
    for name in ("first", "tests", "compile"):
        printed = (rehearsed / "build" / "gpu" / "rehearsal" / f"{name}.log").read_text().splitlines()
        assert " passed" in printed[-1], name
        skipped = [line for line in printed if line.startswith("SKIPPED")]
        assert all(line.endswith("asks the CUDA runtime") for line in skipped), skipped
