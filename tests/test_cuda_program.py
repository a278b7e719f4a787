"""tests/c/test_cuda.c on the simulated driver: the CUDA backend in C, without Python or PyTorch."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest
from simcuda import build
from test_c_programs import CC, FLAGS, OPTIONS, ROOT, build_command, runner

PROGRAM = ROOT / "tests" / "c" / "test_cuda.c"
SANITIZE = {"plain": "", "address": "", "thread": "thread"}


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """The kernel image, made from the sources as they are now."""
    folder = tmp_path_factory.mktemp("image")
    try:
        nvcc = build.nvcc()
    except build.UnavailableError as error:
        pytest.skip(str(error))
    helper = runpy.run_path(str(ROOT / "csrc" / "kernels" / "build_image.py"))
    content, note = helper["build"](nvcc, str(ROOT / "csrc" / "kernels" / "cast.cu"), str(folder))
    assert "for older drivers" in note
    assert "no PTX" not in note
    place = folder / "image"
    place.write_bytes(content)
    return place


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The program by sanitizer, built once."""
    built: dict[str, Path] = {}

    def get(flavour: str) -> Path:
        if flavour not in built:
            target = tmp_path_factory.mktemp("program") / flavour
            command = [CC, *build_command(PROGRAM), *FLAGS[flavour], "-o", str(target)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            built[flavour] = target
        return built[flavour]

    return get


def run(program: Path, image: Path, library: Path, *arguments: str, prefix=(), **environment: str) -> str:
    # Threads of the simulator outlive the fork that is tested.
    options = OPTIONS | {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0"}
    done = subprocess.run(
        [*prefix, str(program), *arguments],
        env=os.environ | options | {"DDP_MP_SIMCUDA": str(library), "DDP_MP_IMAGE": str(image)} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stderr


def run_sanitized(flavour: str, programs, image: Path, *arguments: str) -> None:
    prefix = runner(flavour)
    if prefix is None:
        pytest.skip(f"{CC} has no runtime for {FLAGS[flavour][0]} here")
    run(programs(flavour), image, build.library(SANITIZE[flavour]), *arguments, prefix=prefix)


@pytest.mark.parametrize("flavour", ["plain", pytest.param("address", marks=pytest.mark.slow)])
def test_backend_passes_on_the_simulated_driver(flavour, image, programs):
    run_sanitized(flavour, programs, image)


@pytest.mark.slow
def test_threads_share_a_device_without_races(image, programs):
    run_sanitized("thread", programs, image, "threads")


@pytest.mark.parametrize("capability", ["75", "80", "86", "90", "100", "103", "120"])
def test_every_architecture_runs_its_own_code(capability, image, programs):
    note = f"sm_{capability}, embedded image"
    run(programs("plain"), image, build.library(), "convert", note, SIMCUDA_DEVICES=capability)


def test_driver_older_than_the_toolkit_gets_the_older_ptx(image, programs):
    # A device without machine code in the image, on a driver that cannot compile the toolkit's PTX.
    run(
        programs("plain"), image, build.library(), "convert", "embedded PTX for older drivers",
        SIMCUDA_DEVICES="110", SIMCUDA_DRIVER_VERSION="12040",
    )  # fmt: skip


@pytest.mark.parametrize(
    "hidden",
    [("cuGetProcAddress_v2",), ("cuGetProcAddress_v2", "cuGetProcAddress"), ("cuStreamIsCapturing",)],
    ids=lambda names: "+".join(names),
)
def test_driver_without_a_symbol_still_works(hidden, image, programs):
    run(
        programs("plain"), image, build.library(hide=hidden), "convert", "embedded image",
        SIMCUDA_DEVICES="90", SIMCUDA_HIDE=",".join(hidden),
    )  # fmt: skip


def test_driver_without_a_required_symbol_is_named(image, programs):
    library = build.library(hide=["cuLaunchKernel"])
    run(programs("plain"), image, library, "refuse", "it has no cuLaunchKernel", SIMCUDA_HIDE="cuLaunchKernel")


def test_device_older_than_the_kernels_is_refused(image, programs):
    run(programs("plain"), image, build.library(), "refuse", "compute capability 7.0", SIMCUDA_DEVICES="70")
