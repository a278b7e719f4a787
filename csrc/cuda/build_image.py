"""Compiles the kernels into the image that the extension embeds.  Standard library only: setup.py runs it.

The image is a fat binary with machine code *and* PTX for every architecture, uncompressed, followed by one PTX text for
drivers that are older than the toolkit::

    fat binary | PTX text, NUL | length of the text, 8 bytes little-endian | b"mp-ptx01"

A fat binary carries its own size, so that whoever reads only that never sees what follows.  PTX beside every machine
code serves devices newer than the toolkit, and the tests, which execute it.  The toolkit stamps its own ISA version on
every PTX that it writes, which a driver older than the toolkit refuses to compile, although these kernels use nothing
new: the extra text is that of the oldest architecture under the first version that knew it.  Assembling is part of
every build, so a kernel that does not assemble for one architecture never ships.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess

# Machine code of x.0 runs on every x.y of the same x, so these cover all devices from Turing on.  No "a" or "f"
# targets: those run nowhere else.
ARCHITECTURES = (75, 80, 90, 100, 120)

# The architecture of the extra text, and the ISA versions to give it, oldest first.
OLDEST = 75
OLD_VERSIONS = ("6.3", "6.4", "7.0")

TRAILER_MAGIC = b"mp-ptx01"

FLAGS = ["-O3", "-std=c++17"]


def build(nvcc: str, source: str, out_dir: str) -> tuple[bytes, str]:
    """The image and one line that describes it.  Raises RuntimeError with the compiler's words when it fails."""
    known = set(re.findall(r"sm_(\d+)", _run([nvcc, "--list-gpu-code"])))
    targets = [architecture for architecture in ARCHITECTURES if str(architecture) in known]
    if not targets:
        raise RuntimeError(f"{nvcc} compiles for none of sm_{', sm_'.join(map(str, ARCHITECTURES))}")
    image = _fat_binary(nvcc, source, out_dir, targets)
    text, version = _old_ptx(nvcc, source, out_dir, targets[0])
    if text:
        image += text + b"\0" + struct.pack("<Q", len(text)) + TRAILER_MAGIC
    note = f"nvcc {_release(nvcc)}, machine code and PTX for sm_{', sm_'.join(map(str, targets))}"
    return image, f"{note}; {version}"


def _fat_binary(nvcc: str, source: str, out_dir: str, targets: list[int]) -> bytes:
    output = os.path.join(out_dir, "cast.fatbin")
    code = [f"-gencode=arch=compute_{target},code=[sm_{target},compute_{target}]" for target in targets]
    _run([nvcc, *FLAGS, "-fatbin", *_uncompressed(nvcc), *code, "-o", output, source])
    with open(output, "rb") as file:
        return file.read()


def _uncompressed(nvcc: str) -> list[str]:
    """What keeps this nvcc from compressing; the first spelling is newer, the second goes away."""
    return ["--compress-mode=none"] if "--compress-mode" in _run([nvcc, "--help"]) else ["--no-compress"]


def _old_ptx(nvcc: str, source: str, out_dir: str, target: int) -> tuple[bytes, str]:
    """The text for old drivers and a word about it; empty when no older version assembles."""
    output = os.path.join(out_dir, "cast.ptx")
    _run([nvcc, *FLAGS, "-ptx", f"-arch=compute_{target}", "-o", output, source])
    with open(output, encoding="ascii") as file:
        written = file.read()
    for version in OLD_VERSIONS if target == OLDEST else ():
        text = re.sub(r"^\.version .*$", f".version {version}", written, count=1, flags=re.MULTILINE)
        relabelled = os.path.join(out_dir, f"cast-{version}.ptx")
        with open(relabelled, "w", encoding="ascii") as file:
            file.write(text)
        try:
            _run([nvcc, "-cubin", f"-arch=sm_{target}", "-o", relabelled + ".cubin", relabelled])
        except RuntimeError:
            continue
        return text.encode("ascii"), f"PTX {version} of sm_{target} for older drivers"
    return b"", "no PTX for older drivers"


def _release(nvcc: str) -> str:
    found = re.search(r"\bV(\d+(?:\.\d+)*)", _run([nvcc, "--version"]))
    return found.group(1) if found else "of unknown version"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout.strip()}")
    return done.stdout
