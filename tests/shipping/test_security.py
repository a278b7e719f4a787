"""What docs/security.md promises of the installed package: which code it loads, and what it never does."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from kit.inside import _C

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddp_mp"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="nm and the loader of Linux")

# The door to the programs in tools/, which a user starts by name; everything else may be part of a training run.
TOOLS = {"__main__.py"}
TRAINING = sorted(path for path in PACKAGE.glob("*.py") if path.name not in TOOLS)

LIBRARY = """
#include <stdio.h>
__attribute__((constructor)) static void loaded(void) { puts("planted library loaded"); }
"""

PROGRAM = """
#include <stdio.h>
#include "cuda/driver.h"
#include "cuda/nvrtc.h"
int main(void)
{
    const char *why;
    char note[256];
    (void)mp_cuda_load(&why);
    (void)mp_nvrtc_compile("", 90, note, sizeof note);
    puts("done");
    return 0;
}
"""

NAMES = ("libcuda.so.1", "libcuda.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so")


def compile_c(text: str, output: Path, *arguments: str) -> None:
    source = output.with_suffix(".c")
    source.write_text(text)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    subprocess.run([*compiler, "-std=c11", "-D_GNU_SOURCE", str(source), *arguments, "-o", str(output)], check=True)


def output_of(program: Path, folder: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return subprocess.run([program], cwd=folder, env=clean | environment, check=True, capture_output=True, text=True).stdout


def test_libraries_of_the_current_folder_are_not_loaded(tmp_path: Path) -> None:
    csrc = ROOT / "csrc"
    program, folder = tmp_path / "program", tmp_path / "folder"
    folder.mkdir()
    compile_c(
        PROGRAM, program, f"-I{csrc}", str(csrc / "cuda" / "driver.c"), str(csrc / "cuda" / "nvrtc.c"), "-pthread", "-ldl"
    )
    compile_c(LIBRARY, folder / NAMES[0], "-shared", "-fPIC")
    for name in NAMES[1:]:
        shutil.copy(folder / NAMES[0], folder / name)
    assert "planted" not in output_of(program, folder)
    # where the loader is told to look there, it does: the libraries are such as would be loaded
    assert output_of(program, folder, LD_LIBRARY_PATH=str(folder)).count("planted library loaded") == 2


def symbols_used() -> set[str]:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listed = subprocess.run(["nm", "-D", "--undefined-only", _C.__file__], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


def test_extension_calls_neither_network_nor_files_nor_programs() -> None:
    used = symbols_used()
    assert "dlopen" in used  # the list is one
    forbidden = "socket connect bind listen accept send recv getaddrinfo open openat fopen creat unlink getenv secure_getenv"
    forbidden += " setenv system popen fork execve execvp posix_spawn mmap mprotect"
    assert used & set(forbidden.split()) == set()


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_training_code_imports_nothing_that_reaches_out(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    parts = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    imported |= {str(node.module) for node in parts if {part.name for part in node.names} != {"register_at_fork"}}
    roots = {name.split(".")[0] for name in imported}
    assert (
        roots & {"os", "pickle", "marshal", "shelve", "socket", "urllib", "http", "subprocess", "ctypes", "tempfile"} == set()
    )
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert {f.id for f in called if isinstance(f, ast.Name)} & {"open", "eval", "exec", "compile", "__import__"} == set()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_package_unpickles_nothing_and_uses_no_shell(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        assert name not in ("torch.load", "pickle.load", "pickle.loads", "dist.all_gather_object", "dist.broadcast_object_list")
        assert not any(keyword.arg == "shell" for keyword in node.keywords)
