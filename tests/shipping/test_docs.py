"""The pages of docs/: their code runs, their commands print what is shown, and nothing that they must name is missing.

In a page, ``python`` blocks run one after the other in one namespace, ``console`` blocks run what follows ``$`` and compare the
output, where ``...`` stands for anything and figures may be a tenth off.  Blocks of other languages are only shown.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import doctest
import io
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sybil
import torch
import torch.distributed as dist
from sybil.parsers import myst

import ddp_mp
from ddp_mp import __main__ as command_line
from ddp_mp.options import Options
from ddp_mp.tools.upstream import silent_device_events

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")


# --- running a page ------------------------------------------------------------------------------------------------------


def agrees(expected: str, found: str) -> bool:
    """Whether a command printed what the page shows."""
    expected, found = expected.strip() + "\n", found.strip() + "\n"
    if "..." in expected:
        return doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    figures = list(zip(FIGURE.findall(expected), FIGURE.findall(found), strict=False))
    if FIGURE.sub("#", expected) != FIGURE.sub("#", found):
        return False
    return all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=0.005) for a, b in figures)


def printed(function: Callable[[], object]) -> str:
    """What a function prints; it may end with SystemExit, as a program does."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        function()
    return output.getvalue()


def run_command(line: str) -> str:
    """What a command of a page prints.  Programs of one process run in this one, to save the import of PyTorch."""
    name, *arguments = shlex.split(line)
    if name == "python" and arguments[:2] == ["-m", "ddp_mp"]:
        return printed(lambda: command_line.main(arguments[2:]))
    if name == "python" and arguments[0].startswith("examples/"):
        program = runpy.run_path(str(ROOT / arguments[0]))
        return printed(lambda: program["main"](arguments[1:]))
    assert name == "torchrun", f"the tests do not know how to run: {line}"
    script = [str(ROOT / part) if part.startswith("examples/") else part for part in arguments]
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "MASTER_", "RANK", "LOCAL_"))
    }
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_console(example: sybil.Example) -> str | None:
    """Sybil's evaluator of ``console`` blocks."""
    for part in re.split(r"(?m)^\$ ", str(example.parsed))[1:]:
        line, _, expected = part.partition("\n")
        found = run_command(line)
        if not agrees(expected, found):
            return f"{line}\nexpected:\n{expected}\nfound:\n{found}"
    return None


PARSERS = sybil.Sybil(
    parsers=[
        myst.PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS),
        myst.CodeBlockParser("console", run_console),
    ],
    path=str(DOCS),
    pattern="*.md",
)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder with the program that the pages say to save there; ends what a page leaves open."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples/train.py", tmp_path)
    yield tmp_path
    ddp_mp.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES)
def test_page_examples_do_what_is_shown(page: str, own_folder: Path) -> None:
    for example in PARSERS.parse(DOCS / page).examples():
        example.evaluate()


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("loss 1.00", "loss 1.05", True),
        ("loss 1.00", "loss 1.25", False),
        ("loss 1.00", "loss 1.00\nmore", False),
        ("torch 2.13.0\n...", "torch 2.13.0\na\nb", True),
        ("right", "wrong", False),
    ],
)
def test_printed_text_is_compared_up_to_figures(expected: str, found: str, same: bool) -> None:
    assert agrees(expected, found) == same


# --- completeness --------------------------------------------------------------------------------------------------------


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in ddp_mp.__all__ if name != "__version__"])
def test_public_name_is_on_the_api_page_and_documented(name: str) -> None:
    assert re.search(rf"auto\w+:: ddp_mp\.{name}(\(.*\))?$", text_of("api.md"), re.MULTILINE)
    assert len(getattr(ddp_mp, name).__doc__ or "") > 40


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Options)])
def test_option_has_its_section(field: str) -> None:
    assert re.search(rf"^## .*`{field}`", text_of("options.md"), re.MULTILINE)
    assert f"{field}:" in (Options.__doc__ or "")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ddp_mp.Stats)])
def test_statistic_is_documented(field: str) -> None:
    assert f"        {field}: " in (ddp_mp.Stats.__doc__ or "")


def test_quick_start_points_at_our_line() -> None:
    (shown,) = re.findall(r":emphasize-lines: (\d+)", text_of("quickstart.md"))
    assert "ddp_mp.patch(" in (ROOT / "examples/train.py").read_text(encoding="utf-8").splitlines()[int(shown) - 1]


def test_picture_is_what_its_program_draws() -> None:
    drawn = runpy.run_path(str(DOCS / "picture.py"))["lines"]()
    assert (DOCS / "step.svg").read_text(encoding="utf-8") == "\n".join(drawn) + "\n"


def test_every_case_of_the_comparison_has_its_section() -> None:
    cases = runpy.run_path(str(ROOT / "examples/compare.py"))["CASES"]
    shown = re.findall(r":pyobject: (\w+)", text_of("without-it.md"))
    assert sorted(shown) == sorted(cases)
    run = re.findall(r"compare.py --only (\w+)", text_of("without-it.md"))
    assert sorted(run) == sorted(cases)


def test_comparison_runs_where_cuda_has_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:  # as of a PyTorch built for CUDA, on a machine without a GPU
        def __init__(self, device: str = "cuda") -> None:
            if device != "cpu":
                raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with silent_device_events():
        torch.Stream()
    assert torch.Stream is Stream


def test_every_page_is_reached_from_the_index() -> None:
    listed = re.findall(r"(?m)^(?:[A-Z][^<\n]*<)?([a-z-]+)>?$", text_of("index.md"))
    left = [page for page in PAGES if page != "index.md" and page[:-3] not in listed]
    assert left == []


# --- errors --------------------------------------------------------------------------------------------------------------


def constant_parts(node: ast.expr) -> str | None:
    """The message of an error as the page writes it: a space-normalised text with ``…`` for what varies."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return None


def raised() -> Iterator[tuple[str, str]]:
    """(place, message) of every error that the Python side raises with a text of its own."""
    for path in sorted((ROOT / "ddp_mp").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            message = constant_parts(node.exc.args[0])
            if message is not None:
                yield f"{path.name}:{node.lineno}", message


def told() -> list[str]:
    """Messages on the page: code at the start of a table's row."""
    return re.findall(r"(?m)^\| `+ ?(.+?) ?`+ \|", text_of("troubleshooting.md"))


def pattern_of(message: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, message.split("…"))))


ERRORS = dict(raised())


@pytest.mark.parametrize("place", ERRORS)
def test_error_is_on_the_troubleshooting_page(place: str) -> None:
    message = ERRORS[place]
    assert any(pattern_of(row).search(message) for row in told()), f"no row for: {message}"


def test_every_row_of_the_troubleshooting_page_is_an_error_of_ours() -> None:
    sources = [re.sub(r'"\s*\n\s*"', "", p.read_text(encoding="utf-8")) for p in (ROOT / "csrc").rglob("*.c")]
    known = [
        *ERRORS.values(),
        *sources,
        *(
            re.sub(r'"\s*\n\s*f?"', "", (ROOT / f"ddp_mp/{n}.py").read_text())
            for n in ("backward", "ddp", "forward", "patching", "step")
        ),
    ]
    stale = [row for row in told() if not any(pattern_of(row).search(text) for text in known)]
    assert stale == []


def test_errors_are_found_in_the_sources() -> None:
    assert len(ERRORS) > 30
    assert any("expected a DistributedDataParallel model" in message for message in ERRORS.values())
