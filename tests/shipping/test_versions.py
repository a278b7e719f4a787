"""A PyTorch that ddp_mp cannot work with says so at import."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from kit.inside import versions
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.parametrize("version", ["1.13.1", "2.4.0+cu121", "2.9.1"])
def test_version_that_is_too_old_is_an_import_error(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for name in [name for name in sys.modules if name.partition(".")[0] == "ddp_mp" and name != "ddp_mp._C"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as error:
        importlib.import_module("ddp_mp")
    assert str(error.value) == f"ddp_mp needs PyTorch 2.10 or newer; this is {version}"


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.100.0", "3.0.0.dev20270101", "unknown"])
def test_version_that_is_new_enough_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    versions.require()


def test_version_without_something_needed_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedDataParallel, "_ddp_init_helper")
    with pytest.raises(ImportError, match=r"it has no DistributedDataParallel\._ddp_init_helper$"):
        versions.require()


def test_version_built_without_processes_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(
        ImportError, match=r"^ddp_mp needs a PyTorch with torch\.distributed; this one, .*, was built without it$"
    ):
        versions.require()


def test_version_that_is_required_is_that_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'dependencies = ["torch>={versions.OLDEST[0]}.{versions.OLDEST[1]}"]' in project
