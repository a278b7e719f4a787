"""The container, and which image is taken from it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from .build import fatbin, nvcc, run
from .images import ARCHITECTURES, kernel, sample
from .sim import Schedule

pytestmark = pytest.mark.long

SOURCE = Path(__file__).parent / "kernels" / "sample.cu"


@pytest.fixture
def load(simulator, cu):
    def load(image: bytes, capability: int = 90, driver: int = 13000) -> int:
        simulator.reset(Schedule.EAGER)
        simulator.set_devices(capability)
        simulator.set_driver_version(driver)
        cu.start()
        return cu.code("cuModuleLoadData", image)

    return load


@pytest.mark.parametrize("capability", [*ARCHITECTURES, 86, 89, 103, 121])
def test_every_device_takes_its_own_image(load, simulator, capability):
    assert load(sample(), capability) == 0
    assert simulator.report() == []


def test_device_older_than_all_images_finds_none(load, simulator):
    assert load(sample(), 70) == 209
    assert simulator.report() == []


def test_newer_device_compiles_the_newest_ptx_that_fits(load):
    assert load(sample(), 110) == 0


def test_old_driver_takes_machine_code_but_not_new_ptx(load):
    assert load(sample(), 90, driver=12000) == 0
    assert load(sample(), 110, driver=12000) == 222
    assert load(kernel(""), 90, driver=11080) == 0
    assert load(kernel(""), 90, driver=11070) == 222


def test_machine_code_without_ptx_is_refused_with_advice(load, simulator):
    image = fatbin(SOURCE, (80,)).read_bytes()
    only_cubin = bytearray(image)
    header = struct.unpack_from("<H", image, 6)[0]
    at = header
    while at < len(image):  # turn PTX entries into machine code of another architecture
        kind, _, size, payload = struct.unpack_from("<HHIQ", image, at)
        if kind == 1:
            struct.pack_into("<H", only_cubin, at, 2)
            struct.pack_into("<I", only_cubin, at + 28, 75)
        at += size + payload
    assert load(bytes(only_cubin), 80) == 218
    assert "code=[sm_N,compute_N]" in simulator.report()[0]


def test_compressed_ptx_is_refused_with_advice(load, simulator, tmp_path):
    compressed = tmp_path / "compressed.fatbin"
    options = ["-O3", "--fatbin", "-gencode=arch=compute_90,code=compute_90", str(SOURCE), "-o", str(compressed)]
    run([nvcc(), *options])
    assert load(compressed.read_bytes()) == 218
    assert "--compress-mode=none" in simulator.report()[0]


def test_truncated_container_is_refused(load, simulator):
    broken = bytearray(sample())
    struct.pack_into("<Q", broken, struct.unpack_from("<H", broken, 6)[0] + 8, 1 << 40)
    assert load(bytes(broken)) == 218
    assert "impossible size" in simulator.report()[0]


def test_elf_is_refused(load, simulator):
    assert load(b"\x7fELF" + bytes(64)) == 218
    assert "cubin" in simulator.report()[0]


def test_text_behind_the_container_is_not_looked_at(load):
    assert load(sample() + b"trailer") == 0
