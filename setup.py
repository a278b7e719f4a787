"""Builds ``ddp_mp._C``.  Needs a C compiler and nothing else: neither PyTorch nor a CUDA toolkit.

Everything that is not about the extension is in pyproject.toml.  Environment variables:

``DDP_MP_DEVELOP=1``    warnings are errors; sets ``DDP_MP_TESTING``, too
``DDP_MP_TESTING=1``    functions that only tests and benchmarks call are built in: never in a wheel
``DDP_MP_DEBUG=1``      ``-O0 -g3`` with assertions
``DDP_MP_SANITIZE=...`` ``address,undefined`` or ``thread``
``DDP_MP_CUDA=0``       no kernel image, also where nvcc is found (the kernels can still be compiled at run time)

One wheel serves one Python version and every PyTorch.  docs/wheels.md says why it is not abi3.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = "csrc/cuda"
SOURCE = f"{KERNELS}/cast.cu"
HELPER = f"{KERNELS}/build_image.py"
TESTING = "tests/kit/c/testing.c"


def version() -> str:
    """The version, from its only place.  Not imported: that would import PyTorch."""
    names: dict[str, str] = {}
    with open("ddp_mp/_version.py", encoding="utf-8") as file:
        exec(file.read(), names)
    return names["__version__"]


def enabled(name: str, default: str = "0") -> bool:
    return os.environ.get(name, default).lower() not in ("", "0", "no", "off", "false")


def flags() -> tuple[list[str], list[str]]:
    """Compiler and linker flags."""
    compiling = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread", "-fstack-protector-strong"]
    linking = ["-pthread", "-Wl,-z,relro,-z,now"]
    sanitizers = os.environ.get("DDP_MP_SANITIZE", "")
    if enabled("DDP_MP_DEBUG"):
        compiling += ["-O0", "-g3", "-UNDEBUG"]
    elif sanitizers:
        compiling += ["-O1", "-g", "-UNDEBUG"]
    else:
        # Defined anew, because distributions predefine it; only here, because it needs an optimising compiler and
        # hides from the sanitizers the calls it replaces.
        compiling += ["-O3", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
    if sanitizers:
        chosen = f"-fsanitize={sanitizers}"
        compiling += [chosen, "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
        linking += [chosen]
    if enabled("DDP_MP_DEVELOP"):
        compiling += ["-Wall", "-Wextra", "-Wstrict-prototypes", "-Wconversion", "-Wvla", "-Werror"]
    return compiling, linking


def find_nvcc() -> str | None:
    places = [os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for place in [*places, os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]:
        if found := shutil.which("nvcc", path=place):
            return found
    return None


def image_key(nvcc: str) -> str:
    """Changes with anything that the kernel image is made from."""
    digest = hashlib.sha256(f"{os.path.realpath(nvcc)} {os.stat(nvcc).st_mtime_ns}".encode())
    for name in sorted([*glob(f"{KERNELS}/*"), *glob("csrc/*/*.h")]):
        if os.path.isfile(name):
            with open(name, "rb") as file:
                digest.update(file.read())
    return digest.hexdigest()[:16]


def compile_image(nvcc: str, directory: str) -> tuple[bytes, str]:
    """The image and what it is, compiled anew only when something it is made from has changed."""
    directory = os.path.join(directory, image_key(nvcc))
    image_file, note_file = os.path.join(directory, "image"), os.path.join(directory, "note")
    if os.path.isfile(note_file):
        with open(image_file, "rb") as binary, open(note_file, encoding="utf-8") as text:
            return binary.read(), text.read()
    os.makedirs(directory, exist_ok=True)
    image, note = runpy.run_path(HELPER)["build"](nvcc, SOURCE, directory)
    with open(image_file, "wb") as binary:
        binary.write(image)
    with open(note_file, "w", encoding="utf-8") as text:  # last: it says that the folder is complete
        text.write(note)
    return image, note


def cuda_image(directory: str) -> tuple[bytes, str]:
    """The kernel image and a note.  Never fails: without an image the note says why."""
    if not enabled("DDP_MP_CUDA", default="1"):
        return b"", "switched off by DDP_MP_CUDA=0 at build time"
    for needed in (SOURCE, HELPER):
        if not os.path.isfile(needed):
            return b"", f"{needed} was missing at build time"
    if (nvcc := find_nvcc()) is None:
        return b"", "nvcc was not found at build time"
    try:
        return compile_image(nvcc, directory)
    except Exception as error:  # a broken toolkit must not keep anybody from the CPU path
        return b"", f"nvcc failed at build time: {error}"


def c_string(text: str) -> str:
    """A C literal.  Octal escapes end after three digits, whatever follows."""
    return '"' + "".join(c if 32 <= ord(c) < 127 and c not in '"\\?' else _octal(c) for c in text) + '"'


def _octal(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode())


# .incbin reads megabytes in no time, where a C array initialiser takes the compiler many seconds.
EMBED = """\
/* Generated by setup.py. */
#include "cuda/embedded.h"

#define EMBED(symbol, file) \\
    __asm__(".pushsection .rodata, \\"a\\"\\n" \\
            ".balign 64\\n" \\
            ".globl " #symbol "\\n" \\
            ".hidden " #symbol "\\n" \\
            ".type " #symbol ", %object\\n" \\
            #symbol ":\\n" \\
            ".incbin \\"" file "\\"\\n" \\
            ".byte 0\\n" \\
            ".size " #symbol ", . - " #symbol "\\n" \\
            ".popsection\\n")

EMBED(mp_cuda_image, {image_file});
EMBED(mp_cuda_source, {source_file});

const size_t mp_cuda_image_size = {size};
const char mp_cuda_image_note[] = {note};
"""


class BuildExt(build_ext):
    """Embeds the kernels, and compiles the C files side by side."""

    def build_extension(self, ext: Extension) -> None:
        os.makedirs(self.build_temp, exist_ok=True)
        listed = ext.sources
        # The compiler object belongs to this command, so what is set on it does not outlive it.
        compile_one = self.compiler.compile
        self.compiler.compile = lambda sources, *args, **kwargs: _side_by_side(compile_one, sources, *args, **kwargs)
        # Some interpreters link with a search path of the machine that they were built on; we need no library but libc.
        self.compiler.linker_so = [part for part in self.compiler.linker_so if not part.startswith("-Wl,-rpath")]
        try:
            ext.sources = [*listed, self.embed_kernels()]
            super().build_extension(ext)
        finally:
            ext.sources = listed  # a generated file is not part of a source distribution

    def embed_kernels(self) -> str:
        # Not in build_temp: an editable build has a new one every time, and nvcc takes longer than everything else.
        image, note = cuda_image(os.path.join("build", "cuda"))
        print(f"ddp_mp: kernel image: {len(image)} bytes; {note}")
        source = b""
        if os.path.isfile(SOURCE):
            with open(SOURCE, "rb") as file:
                source = file.read()
        image_file = _write(os.path.join(self.build_temp, "cuda_image.bin"), image)
        source_file = _write(os.path.join(self.build_temp, "cuda_source.cu"), source)
        text = EMBED.format(
            image_file=c_string(os.path.abspath(image_file)),
            source_file=c_string(os.path.abspath(source_file)),
            size=len(image),
            note=c_string(note),
        )
        return _write(os.path.join(self.build_temp, "cuda_image.c"), text.encode())


def _write(name: str, content: bytes) -> str:
    with open(name, "wb") as file:
        file.write(content)
    return name


def _side_by_side(compile_one: Any, sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
    def compile_with_own_flags(source: str) -> list[str]:
        own = {**kwargs, "extra_postargs": [*(kwargs.get("extra_postargs") or []), *_own_flags(source)]}
        return compile_one([source], *args, **own)

    count = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(sources))
    with ThreadPoolExecutor(max_workers=max(count, 1)) as pool:
        return [name for names in pool.map(compile_with_own_flags, sources) for name in names]


def _own_flags(source: str) -> list[str]:
    """What one file alone needs."""
    if "address" in os.environ.get("DDP_MP_SANITIZE", "") and os.path.basename(source) == "convert_avx512.c":
        # GCC (bug 110027, in 12 at least) aligns the frames of this check to 32 bytes and then stores 64 aligned ones.
        return [] if "clang" in os.environ.get("CC", "") else ["--param=asan-use-after-return=0"]
    return []


compiling, linking = flags()
testing = enabled("DDP_MP_DEVELOP") or enabled("DDP_MP_TESTING")
setup(
    ext_modules=[
        Extension(
            "ddp_mp._C",
            sources=[*sorted(glob("csrc/*/*.c")), *([TESTING] if testing else [])],
            include_dirs=["csrc"],
            define_macros=[("MP_VERSION", f'"{version()}"'), *([("DDP_MP_TESTING", "1")] if testing else [])],
            extra_compile_args=compiling,
            extra_link_args=linking,
            # Every file that is compiled or embedded, so that a change of any of them builds the extension again.
            depends=sorted([*glob("csrc/*/*.h"), *glob(f"{KERNELS}/*.*"), "setup.py", "ddp_mp/_version.py"]),
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
