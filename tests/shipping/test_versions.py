"""A PyTorch that ddp_mp cannot work with says so at import."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.inside import versions
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["1.13.1", "2.4.0+cu121", "2.9.1"])
def test_version_that_is_too_old_is_an_import_error(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ddp_mp" and name != "ddp_mp._C"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as error:
        importlib.import_module("ddp_mp")
    assert str(error.value) == f"ddp_mp needs PyTorch 2.10 or newer; this is {version}"


def test_version_without_any_pytorch_is_an_import_error_that_says_so() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import ddp_mp"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert result.stderr.splitlines()[-1] == (
        "ImportError: ddp_mp needs PyTorch 2.10 or newer, and there is none in this environment: install torch, in the build "
        "for your machine"
    )


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.100.0", "3.0.0.dev20270101", "unknown"])
def test_version_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    versions.require()


def test_version_without_something_needed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_remove_autograd_hooks")
    with pytest.raises(
        ImportError, match=r"it has no torch\.nn\.parallel\.distributed\.DistributedDataParallel\._remove_autograd_hooks$"
    ):
        versions.require()


@pytest.mark.parametrize("part", versions.NEEDED, ids=lambda part: f"{part.home.rpartition('.')[2]}-{part.name}")
def test_version_without_a_part_is_an_error_that_names_it(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = part._replace(name=f"{part.name}_of_old")
    monkeypatch.setattr(versions, "NEEDED", tuple(renamed if other is part else other for other in versions.NEEDED))
    with pytest.raises(ImportError) as error:
        versions.require()
    assert str(error.value).endswith(f": it has no {part.home}.{part.name}_of_old")


def test_version_that_lost_a_whole_module_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = versions.Part("torch.no_such_module", "name", "2.10", "a module that went away")
    monkeypatch.setattr(versions, "NEEDED", (lost,))
    with pytest.raises(ImportError, match=r"it has no torch\.no_such_module\.name$"):
        versions.require()


def test_parts_each_have_a_reason_and_a_release() -> None:
    parts = versions.NEEDED + versions.OPTIONAL
    assert len({(part.home, part.name) for part in parts}) == len(parts)
    for part in parts:
        assert part.why
        assert re.fullmatch(r"2\.\d+", part.since), part


#: Private names that are not PyTorch's.
OTHERS = {"_C", "_exit", "_getframe", "_make"}
#: PyTorch's, on the way to a part.
HOMES = {"_C", "_autograd", "_dynamo", "_functorch", "_named_member_accessor"}


def private_names() -> dict[str, str]:
    """Names with an underscore in the package's sources that the package does not define, and where each of them stands."""
    used: dict[str, str] = {}
    own: set[str] = set()
    for path in sorted((ROOT / "ddp_mp").glob("*.py")):
        if path.name == "versions.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.arg):
                own.add(node.arg if isinstance(node, ast.arg) else node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                own.add(node.attr)
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            used.update((name, f"{path.name}:{node.lineno}") for name in names if re.fullmatch(r"_[A-Za-z]\w*", name))
    for path in sorted((ROOT / "csrc").rglob("*.c")):
        used.update((name, path.name) for name in re.findall(r'"(_[a-z]\w+)"', path.read_text()))
    return {name: where for name, where in used.items() if name not in own}


def test_parts_are_all_that_is_private() -> None:
    listed = {part.name for part in versions.NEEDED + versions.OPTIONAL} | OTHERS | HOMES
    unlisted = {name: where for name, where in private_names().items() if name not in listed and not name.startswith("_ddp_mp")}
    assert unlisted == {}


def test_parts_are_all_used() -> None:
    used = private_names()
    text = "".join(path.read_text() for path in (ROOT / "ddp_mp").rglob("*.py") if path.name != "versions.py")
    text += "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.[ch]"))
    for part in versions.NEEDED + versions.OPTIONAL:
        assert part.name in used or re.search(rf"\b{part.name}\b", text), part


def test_version_built_without_processes_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(
        ImportError, match=r"^ddp_mp needs a PyTorch with torch\.distributed; this one, .*, was built without it$"
    ):
        versions.require()


def test_version_that_is_required_is_that_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'dependencies = ["torch>={versions.OLDEST[0]}.{versions.OLDEST[1]}"]' in project
