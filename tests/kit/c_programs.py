"""Builds the C programs of the tests, which use the C core without Python, plainly and under sanitizers.

The first comment of a program holds the command that builds it, from `gcc` to the first line that does not end in a
backslash, to be run in the root of the checkout.  Sanitizers in it are replaced by those of the test.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
CC = os.environ.get("CC", "gcc")
#: What runs a program of a cross compiler.
EMULATOR = shlex.split(os.environ.get("DDP_MP_EMULATOR", ""))
FLAGS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer", "-O1", "-g"],
}
OPTIONS = {
    # No detect_stack_use_after_return: GCC's fake frames are not aligned for spilled 64-byte vectors.
    "ASAN_OPTIONS": "abort_on_error=1:detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def build_command(program: pathlib.Path) -> list[str]:
    text = program.read_text()
    comment = re.match(r"\s*/\*(.*?)\*/", text, re.DOTALL)
    assert comment, f"{program.name} has no comment at its top"
    lines = [re.sub(r"^\s*\*?\s*", "", line).rstrip() for line in comment[1].splitlines()]
    start = next((i for i, line in enumerate(lines) if re.match(r"(gcc|cc|\$CC)\s", line)), None)
    assert start is not None, f"the top comment of {program.name} has no line that starts with gcc"
    joined = ""
    for line in lines[start:]:
        joined += line.removesuffix("\\") + " "
        if not line.endswith("\\"):
            break
    words = []
    for word in shlex.split(joined)[1:]:
        if word in ("&&", ";", "||"):
            break
        if word.startswith(("-fsanitize", "-fno-sanitize")):
            continue  # chosen here
        matches = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob(word)) if "*" in word else []
        words += matches or [word]
    if "-o" in words:
        at = words.index("-o")
        del words[at : at + 2]
    return words


@functools.cache
def runner(flavour: str) -> list[str] | None:
    """What a program under this sanitizer must be started with; None where the sanitizer has no runtime here."""
    folder = ROOT / "build" / "tmp" / f"sanitizer-{flavour}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        source, binary = folder / "probe.c", folder / "probe"
        source.write_text("int main(void) { return 0; }\n")
        if subprocess.run([CC, *FLAGS[flavour], str(source), "-o", str(binary)], capture_output=True).returncode:
            return None
        # ThreadSanitizer of older compilers cannot live with the address layout of newer kernels.
        for prefix in (EMULATOR, ["setarch", "--addr-no-randomize", *EMULATOR]):
            if prefix and not shutil.which(prefix[0]):
                continue
            if subprocess.run([*prefix, str(binary)], capture_output=True).returncode == 0:
                return prefix
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
