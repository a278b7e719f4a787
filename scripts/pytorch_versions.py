"""Runs tests on several releases of PyTorch, and writes the table of docs/versions.md.

    python scripts/pytorch_versions.py [--torch 2.10.0 2.14.1] [--tests tests/unit] [--acceptance HARNESS]

Each release has an environment in build/versions, made when it is first needed: PyTorch alone is installed there, and
everything else comes from .venv.  pip takes PyTorch from the index that it is configured with; its build for CUDA takes some
5 GB.  For the build for the CPU, name PyTorch's own index:

    PIP_INDEX_URL=https://download.pytorch.org/whl/cpu make versions

The acceptance scenarios, where they lie beside the checkout or DDP_MP_ACCEPTANCE names them, run on the oldest release and on
the newest.  What a release came to is kept in build/versions, so that the table has the last run of each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/versions"
PAGE = ROOT / "docs/versions.md"
BEGIN, END = "<!-- versions: written by make versions -->", "<!-- versions: end -->"
RELEASES = ["2.10.0", "2.11.0", "2.13.0", "2.14.1"]
ACCEPTANCE = Path(os.environ.get("DDP_MP_ACCEPTANCE") or ROOT.parent / "shared/acceptance/harness.py")


def environment(release: str) -> Path:
    """The interpreter of an environment with this PyTorch: .venv, or one that is made where it is missing."""
    if metadata.version("torch").partition("+")[0] == release:
        return Path(sys.executable)
    home = WORK / f"torch-{release}"
    python = home / "bin/python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={release}"], check=True)
        query = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own, shared = (
            Path(subprocess.run([path, "-c", query], check=True, capture_output=True, text=True).stdout.strip())
            for path in (str(python), sys.executable)
        )
        # Behind its own packages: PyTorch is found here, all else in .venv, ddp_mp as it is built in place too.
        (own / "zz_shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n", encoding="utf-8")
        (home / "complete").touch()
    return python


def run(name: str, command: list[str]) -> tuple[int, str, int]:
    """Exit status, what was printed, minutes; the output is shown and kept too."""
    log = WORK / f"{name}.log"
    start = time.monotonic()
    printed = []
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": threads},
    )
    assert process.stdout is not None
    with log.open("w", encoding="utf-8") as file:
        for line in process.stdout:
            printed.append(line)
            file.write(line)
            print(line, end="", flush=True)
    return process.wait(), "".join(printed), round((time.monotonic() - start) / 60)


def tests(release: str, python: Path, folders: list[str]) -> dict[str, Any]:
    """What pytest said of one release."""
    temporary = WORK / f"tmp-{release}"
    shutil.rmtree(temporary, ignore_errors=True)
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={temporary}", "--timeout=300", "-q"]
    status, printed, minutes = run(release, [*command, "-n", "2", "--dist", "loadfile", "-m", "not long", *folders])
    shutil.rmtree(temporary, ignore_errors=True)
    summary = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", printed, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    said = summary[-1] if summary else f"no summary, exit status {status}"
    return {"tests": said, "failed": failed, "folders": folders, "minutes": minutes}


def acceptance(release: str, python: Path, harness: Path) -> dict[str, str]:
    """What the acceptance scenarios said: their last line."""
    status, printed, _ = run(f"{release}-acceptance", [str(python), str(harness)])
    lines = [line for line in printed.splitlines() if line.strip()]
    return {"acceptance": lines[-1] if lines else f"exit status {status}"}


def described(python: Path) -> dict[str, str]:
    """The build of PyTorch, and Python's version."""
    program = (
        "import json, platform, torch; print(json.dumps({'torch': torch.__version__, "
        "'build': f'CUDA {torch.version.cuda}, no GPU' if torch.version.cuda and not torch.cuda.is_available() "
        "else f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU', 'python': platform.python_version()}))"
    )
    printed = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = json.loads(printed)
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Rows of the page, oldest release first."""
    lines = ["| PyTorch | its build | Python | tests | acceptance scenarios |", "|---|---|---|---|---|"]
    for result in sorted(results, key=lambda result: [int(part) for part in re.findall(r"\d+", result["release"])]):
        where = ", ".join(f"`{folder}`" for folder in result["folders"])
        cells = [
            result["release"],
            result["build"],
            result["python"],
            f"{where}: {result['tests']}",
            result.get("acceptance", ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    failed = [f"* {result['release']}: `{name}`" for result in results for name in result["failed"]]
    return "\n".join([*lines, *(["", "Tests that failed:", "", *failed] if failed else [])])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=RELEASES, metavar="RELEASE", help=f"unless given: {' '.join(RELEASES)}")
    parser.add_argument(
        "--tests", nargs="+", default=["tests"], help="what pytest is to run (unless given: all that make test runs)"
    )
    parser.add_argument(
        "--acceptance", type=Path, default=ACCEPTANCE, metavar="HARNESS", help="where the acceptance scenarios lie"
    )
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    ends = (options.torch[0], options.torch[-1])
    right = True
    for release in options.torch:
        python = environment(release)
        result = {"release": release, **described(python), **tests(release, python, options.tests)}
        right = right and not result["failed"] and "passed" in result["tests"]
        if release in ends and options.acceptance.is_file():
            result |= acceptance(release, python, options.acceptance)
        (WORK / f"{release}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
        rows = table([json.loads(path.read_text(encoding="utf-8")) for path in sorted(WORK.glob("*.json"))])
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(rows)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
