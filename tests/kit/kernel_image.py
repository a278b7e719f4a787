"""The kernel image, made from the sources as they are now, and kept in build/simcuda until they change."""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path

import pytest
from simulator import build

KERNELS = Path(__file__).parents[2] / "csrc" / "cuda"


def kernel_image() -> Path:
    """Where the image lies.  Skips the test where there is no compiler for it."""
    try:
        nvcc = build.nvcc()
    except build.UnavailableError as error:
        pytest.skip(str(error))
    folder = build.OUTPUT / "kernels"
    made = folder / f"cast-{build.digest(nvcc, *(file.read_text() for file in sorted(KERNELS.iterdir()) if file.is_file()))}"
    with build.locked(folder):
        if not made.exists():
            helper = runpy.run_path(str(KERNELS / "build_image.py"))
            with tempfile.TemporaryDirectory() as scratch:
                content, note = helper["build"](nvcc, str(KERNELS / "cast.cu"), scratch)
            assert "for older drivers" in note
            assert "no PTX" not in note
            fresh = made.with_suffix(".new")
            fresh.write_bytes(content)
            os.replace(fresh, made)
    return made
