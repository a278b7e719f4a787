"""tests/cuda/c/test_cuda.c on the simulated driver: the CUDA backend in C, without Python or PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.c_programs import CC, FLAGS, OPTIONS, ROOT, build_command, runner
from kit.kernel_image import kernel_image
from simulator.build import library as simulated_driver

PROGRAM = ROOT / "tests" / "cuda" / "c" / "test_cuda.c"
SANITIZE = {"plain": "", "address": "", "thread": "thread"}


@pytest.fixture(scope="module")
def image() -> Path:
    """The kernel image, made from the sources as they are now."""
    return kernel_image()


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
    run(programs(flavour), image, simulated_driver(SANITIZE[flavour]), *arguments, prefix=prefix)


@pytest.mark.parametrize("flavour", ["plain", pytest.param("address", marks=pytest.mark.long)])
def test_backend_passes_on_the_simulated_driver(flavour, image, programs):
    run_sanitized(flavour, programs, image)


@pytest.mark.long
def test_threads_share_a_device_without_races(image, programs):
    run_sanitized("thread", programs, image, "threads")


@pytest.mark.parametrize("capability", ["75", "80", "86", "90", "100", "103", "120"])
def test_every_architecture_runs_its_own_code(capability, image, programs):
    note = f"sm_{capability}, embedded image"
    run(programs("plain"), image, simulated_driver(), "convert", note, SIMCUDA_DEVICES=capability)


def test_driver_older_than_the_toolkit_gets_the_older_ptx(image, programs):
    # A device without machine code in the image, on a driver that cannot compile the toolkit's PTX.
    run(
        programs("plain"), image, simulated_driver(), "convert", "embedded PTX for older drivers",
        SIMCUDA_DEVICES="110", SIMCUDA_DRIVER_VERSION="12040",
    )  # fmt: skip


@pytest.mark.parametrize(
    "hidden",
    [("cuGetProcAddress_v2",), ("cuGetProcAddress_v2", "cuGetProcAddress")],
    ids=lambda names: "+".join(names),
)
def test_driver_without_a_symbol_still_works(hidden, image, programs):
    run(
        programs("plain"), image, simulated_driver(hide=hidden), "convert", "embedded image",
        SIMCUDA_DEVICES="90", SIMCUDA_HIDE=",".join(hidden),
    )  # fmt: skip


def test_driver_without_a_required_symbol_is_named(image, programs):
    library = simulated_driver(hide=["cuLaunchKernel"])
    run(programs("plain"), image, library, "refuse", "it has no cuLaunchKernel", SIMCUDA_HIDE="cuLaunchKernel")


def test_device_older_than_the_kernels_is_refused(image, programs):
    run(programs("plain"), image, simulated_driver(), "refuse", "compute capability 7.0", SIMCUDA_DEVICES="70")


# --- no image: NVRTC compiles, if it can -------------------------------------------------------------------------------


@pytest.fixture
def nvrtc(image, tmp_path):
    """Makes a libnvrtc whose result is our PTX; returns what else :func:`run` needs."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from cuda_mutants import ptx_of

    def make(capability: str, *flags: str) -> dict[str, str]:
        source = ROOT / "tests" / "simulator" / "native" / "nvrtc.c"
        command = [CC, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
        command += ["-Wl,-soname,libnvrtc.so.13", str(source), "-o", str(tmp_path / "libnvrtc.so.13")]
        subprocess.run(command, check=True)
        result, empty = tmp_path / "result", tmp_path / "empty"
        texts = ptx_of(image.read_bytes())
        result.write_text(texts[max(known for known in texts if known <= int(capability))])
        empty.write_bytes(b"")
        folders = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH")]))
        given = {"DDP_MP_IMAGE": str(empty), "LD_LIBRARY_PATH": folders, "SIMCUDA_DEVICES": capability}
        return given | {"NVRTC_RESULT": str(result), "NVRTC_KNOWS": "75,80,90,100", "NVRTC_WANTS": f"sm_{capability}"}

    return make


@pytest.mark.parametrize(("capability", "target"), [("90", "sm_90"), ("86", "compute_80"), ("103", "compute_100")])
def test_device_without_an_image_gets_what_nvrtc_compiles(capability, target, image, programs, nvrtc):
    given = nvrtc(capability) | {"NVRTC_WANTS": target}
    run(
        programs("plain"), image, simulated_driver(), "convert", f"sm_{capability}, compiled by NVRTC 13.0 for {target}",
        **given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("failing", "why"),
    [
        ("nvrtcGetNumSupportedArchs", "knows no architecture of this device"),
        ("nvrtcGetSupportedArchs", "knows no architecture of this device"),
        ("nvrtcCreateProgram", "failed (6)"),
        ("nvrtcCompileProgram", "failed (6)"),
        ("nvrtcGetCUBINSize", "failed (0)"),
        ("nvrtcGetCUBIN", "failed (0)"),
    ],
)
def test_failure_of_nvrtc_is_told(failing, why, image, programs, nvrtc):
    given = nvrtc("90") | {"NVRTC_FAILS": failing}
    text = f"no kernel for device 0 (sm_90): no image in this test; NVRTC 13.0 {why}"
    run(programs("plain"), image, simulated_driver(), "refuse", text, **given)


def test_nvrtc_that_knows_only_newer_devices_is_told(image, programs, nvrtc):
    given = nvrtc("75") | {"NVRTC_KNOWS": "80,90"}
    run(
        programs("plain"), image, simulated_driver(), "refuse", "NVRTC 13.0 knows no architecture of this device", **given
    )  # fmt: skip


def test_nvrtc_that_lacks_a_function_is_told(image, programs, nvrtc):
    run(
        programs("plain"), image, simulated_driver(), "refuse", "NVRTC lacks nvrtcGetPTX",
        **nvrtc("90", "-DnvrtcGetPTX=another"),
    )  # fmt: skip


def test_result_of_nvrtc_that_does_not_load_is_told(image, programs, nvrtc):
    given = nvrtc("90")
    Path(given["NVRTC_RESULT"]).write_text("no PTX at all")
    run(programs("plain"), image, simulated_driver(), "refuse", "compiled by NVRTC 13.0 for sm_90: CUDA_ERROR_INVALID", **given)
