"""Building: without PyTorch, with and without nvcc, from a source distribution; what wheels hold."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ddp_mp

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="setuptools is not installed: nothing can be built"
)


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py defines, with the checkout as current folder, and what it hands to setuptools as "arguments"."""
    monkeypatch.chdir(ROOT)
    for name in ("CUDA_HOME", "CUDA_PATH", "DDP_MP_CUDA", "DDP_MP_DEBUG", "DDP_MP_DEVELOP", "DDP_MP_SANITIZE"):
        monkeypatch.delenv(name, raising=False)
    with mock.patch("setuptools.setup") as setup:
        names = runpy.run_path("setup.py")
    return {**names, "arguments": setup.call_args.kwargs}


def fake_nvcc(folder: Path, text: str = "#!/bin/sh\nexit 3\n") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(text)
    nvcc.chmod(0o755)
    return nvcc


def test_compile_commands_compile_every_c_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    entries = runpy.run_path("scripts/compile_commands.py")["entries"]()
    listed = [*(str(path) for path in Path("csrc").glob("*/*.c")), "tests/kit/c/testing.c"]
    assert sorted(entry["file"] for entry in entries) == sorted(listed)
    for entry in entries:
        subprocess.run([*entry["arguments"], "-fsyntax-only"], cwd=entry["directory"], check=True)


def test_nvcc_is_looked_for_in_cuda_home_first(
    setup_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_home, by_path = fake_nvcc(tmp_path / "home/bin"), fake_nvcc(tmp_path / "path")
    monkeypatch.setenv("PATH", str(by_path.parent))
    assert setup_script["find_nvcc"]() == str(by_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert setup_script["find_nvcc"]() == str(by_home)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    assert setup_script["find_nvcc"]() == str(by_path)


def test_image_missing_nvcc_is_a_note(setup_script: dict[str, Any], tmp_path: Path) -> None:
    cuda_image = setup_script["cuda_image"]
    with mock.patch.dict(cuda_image.__globals__, find_nvcc=lambda: None):
        assert cuda_image(str(tmp_path)) == (b"", "nvcc was not found at build time")


def test_image_failing_nvcc_is_a_note_and_leaves_nothing(
    setup_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "cuda/bin").parents[1]))
    for _ in range(2):  # the failure is not kept as a result
        image, note = setup_script["cuda_image"](str(tmp_path / "cache"))
        assert image == b""
        assert note.startswith("nvcc failed at build time: ")


def test_image_switched_off_is_a_note(setup_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_MP_CUDA", "0")
    assert setup_script["cuda_image"](str(tmp_path)) == (b"", "switched off by DDP_MP_CUDA=0 at build time")


def test_image_is_compiled_once_for_the_same_inputs(
    setup_script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []

    def build(nvcc: str, source: str, directory: str) -> tuple[bytes, str]:
        compiled.append((nvcc, source))
        assert os.path.isdir(directory)
        return b"image", "note"

    nvcc = fake_nvcc(tmp_path / "cuda/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with mock.patch.object(runpy, "run_path", return_value={"build": build}):
        for _ in range(2):
            assert setup_script["cuda_image"](str(tmp_path / "cache")) == (b"image", "note")
        assert compiled == [(str(nvcc), "csrc/cuda/cast.cu")]
        os.utime(nvcc, ns=(1, 1))  # another nvcc
        assert setup_script["cuda_image"](str(tmp_path / "cache")) == (b"image", "note")
    assert len(compiled) == 2


def test_extension_is_built_again_when_any_of_its_files_changes(setup_script: dict[str, Any]) -> None:
    (extension,) = setup_script["arguments"]["ext_modules"]
    listed = {*extension.sources, *extension.depends}
    tracked = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.[ch]")}
    assert tracked
    assert not tracked - listed
    assert {"csrc/cuda/cast.cu", "csrc/cuda/build_image.py", "setup.py", "ddp_mp/_version.py"} <= listed


@pytest.mark.parametrize(
    ("environment", "present", "absent"),
    [
        ({}, {"-O3", "-std=c11", "-fvisibility=hidden", "-D_FORTIFY_SOURCE=2"}, {"-Werror", "-UNDEBUG"}),
        ({"DDP_MP_DEVELOP": "1"}, {"-O3", "-Werror", "-Wconversion", "-Wvla"}, {"-UNDEBUG"}),
        ({"DDP_MP_DEVELOP": "0"}, {"-O3"}, {"-Werror"}),
        ({"DDP_MP_DEBUG": "1"}, {"-O0", "-g3", "-UNDEBUG"}, {"-O3", "-D_FORTIFY_SOURCE=2"}),
        ({"DDP_MP_SANITIZE": "thread"}, {"-fsanitize=thread", "-UNDEBUG"}, {"-O3", "-D_FORTIFY_SOURCE=2"}),
    ],
)
def test_flags_follow_the_environment(
    setup_script: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    present: set[str],
    absent: set[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    compiling, linking = setup_script["flags"]()
    assert present <= set(compiling)
    assert not absent & set(compiling)
    assert ("-fsanitize=thread" in linking) == ("DDP_MP_SANITIZE" in environment)


@pytest.mark.parametrize("text", ["", "plain", 'quote " and \\', "??=trigraph", "line\nbreak\t1", "ä 7", "\x017"])
def test_c_string_means_the_text_to_the_compiler(setup_script: dict[str, Any], tmp_path: Path, text: str) -> None:
    program, binary = tmp_path / "program.c", tmp_path / "program"
    program.write_text(f"#include <stdio.h>\nint main(void) {{ fputs({setup_script['c_string'](text)}, stdout); }}\n")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    subprocess.run([*compiler, "-std=c11", str(program), "-o", str(binary)], check=True)
    assert subprocess.run([str(binary)], check=True, capture_output=True).stdout == text.encode()


def build(folder: Path, *command: str, **environment: str) -> None:
    """Runs setup.py where PyTorch cannot be imported."""
    block = folder.parent / "block/torch"
    block.mkdir(parents=True, exist_ok=True)
    (block / "__init__.py").write_text("raise ImportError('PyTorch was imported by the build')\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DDP_MP_", "CUDA_"))}
    clean["PYTHONPATH"] = str(block.parent)
    result = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *command], cwd=folder, env=clean | environment, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """Its extension module."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (built,) = (folder / "ddp_mp").glob("_C*.so")
    return built


def readelf(*arguments: str) -> str:
    return subprocess.run(["readelf", "--wide", *arguments], check=True, capture_output=True, text=True).stdout


def require_hardened(library: Path) -> None:
    """Addresses are fixed before anything runs, the stack is not executable, and the compiler's checks are there."""
    segments, dynamic, symbols = (
        readelf("--segments", str(library)),
        readelf("--dynamic", str(library)),
        readelf("--dyn-syms", str(library)),
    )
    assert "GNU_RELRO" in segments
    assert [line.split()[-2] for line in segments.splitlines() if "GNU_STACK" in line] == ["RW"]
    assert "BIND_NOW" in dynamic
    assert "TEXTREL" not in dynamic
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    assert "__stack_chk_fail" in symbols  # -fstack-protector-strong
    assert re.search(r"__(mem|str|sn?printf|vsn?printf)\w*_chk", symbols)  # _FORTIFY_SOURCE
    defined = {line.split()[-1] for line in symbols.splitlines() if " GLOBAL " in line and " UND " not in line}
    assert defined == {"PyInit__C"}


def require_manylinux(wheel: Path) -> None:
    """The wheel asks of a system no more than a manylinux tag promises."""
    pytest.importorskip("auditwheel")
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found = re.search(r"manylinux_(\d+)_(\d+)_", shown.stdout)
    assert found is not None, shown.stdout
    assert "libtorch" not in shown.stdout
    assert "libcuda" not in shown.stdout


@pytest.mark.long
def test_source_distribution_builds_without_torch_and_nvcc(tmp_path: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path / "copy"
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("benchmarks/", "docs/", "examples/", "tests/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build(copy, "sdist", "--dist-dir", str(tmp_path / "dist"))
    (archive,) = (tmp_path / "dist").glob("ddp_mp-*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    missing = [
        str(path.relative_to(copy))
        for folder in ("csrc", "ddp_mp")
        for path in (copy / folder).rglob("*")
        if path.is_file() and not (unpacked / path.relative_to(copy)).is_file()
    ]
    assert missing == []
    build(unpacked, "bdist_wheel", "--dist-dir", str(tmp_path / "wheels"), DDP_MP_CUDA="0")
    (wheel,) = (tmp_path / "wheels").glob("ddp_mp-*.whl")
    built = unpack_wheel(wheel, tmp_path / "unpacked")
    listed = {path.name for path in (ROOT / "ddp_mp/tools/shapes").glob("*.json")}
    assert {path.name for path in (tmp_path / "unpacked/ddp_mp/tools/shapes").glob("*.json")} == listed
    for name in ("py.typed", "_C.pyi"):
        assert (tmp_path / "unpacked/ddp_mp" / name).is_file()
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('ddp_mp._C', {str(built)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
        "print(module.build_info()['cuda_image']['size'], module.build_info()['cuda_image']['note'])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "0 switched off by DDP_MP_CUDA=0 at build time"
    require_hardened(built)
    require_manylinux(wheel)


def test_version_is_the_same_everywhere() -> None:
    given = ddp_mp.__version__
    assert ddp_mp.build_info()["version"] == given
    assert f"\n## {given}" in (ROOT / "CHANGELOG.md").read_text() or "\n## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    numbers = [
        re.findall(rf"(?<![\d.]){re.escape(given)}(?![\d.])", (ROOT / name).read_text())
        for name in ("setup.py", "pyproject.toml", "ddp_mp/__init__.py")
    ]
    assert numbers == [[], [], []]  # _version.py alone says it


def wheels_command(path: Path, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/wheels.py"), *names]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def shim(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_wheels_without_an_interpreter_are_an_error_that_names_what_was_skipped(tmp_path: Path) -> None:
    stand_in = shim(tmp_path / "python3.12", "echo 'manager: python3.12: command not found' >&2; exit 127")
    result = wheels_command(tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        f"wheels: skipped {stand_in}: does not run: manager: python3.12: command not found\n"
        "wheels: no python3.10 to python3.14 on PATH can be used; name interpreters in PYTHONS\n"
    )


def test_wheels_of_what_is_no_usable_python_are_skipped_by_name(tmp_path: Path) -> None:
    old = shim(tmp_path / "old", """echo '["/old", [3, 9], "cpython", true, false]'""")
    free = shim(tmp_path / "free", """echo '["/free", [3, 14], "cpython", true, true]'""")
    bare = shim(tmp_path / "bare", """echo '["/bare", [3, 12], "cpython", false, false]'""")
    result = wheels_command(tmp_path, old, free, bare, "missing")
    assert result.returncode == 1
    assert result.stderr.splitlines()[:4] == [
        f"wheels: skipped {old}: is cpython 3.9; wheels are for CPython 3.10 to 3.14",
        f"wheels: skipped {free}: is cpython 3.14t; wheels are for CPython 3.10 to 3.14",
        f"wheels: skipped {bare}: is cpython 3.12 without Python.h; install its headers",
        "wheels: skipped missing: not found",
    ]


def test_wheels_find_the_interpreter_behind_names_shims_and_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels = runpy.run_path(str(ROOT / "scripts/wheels.py"))
    (tmp_path / "shims").mkdir()
    (tmp_path / "bin").mkdir()
    for minor in range(10, 15):  # a manager that has none of them
        shim(tmp_path / f"shims/python3.{minor}", "exit 127")
    behind = shim(tmp_path / "bin/python3.12", """echo '["/real/python3.12", [3, 12], "cpython", true, false]'""")
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert ("/real/python3.12", 12) in wheels["choose"]([])
    assert f"skipped {tmp_path}/shims/python3.12: does not run" in capsys.readouterr().err
    assert wheels["choose"]([behind]) == wheels["choose"](["bin/python3.12"]) == [("/real/python3.12", 12)]
    capsys.readouterr()
    assert wheels["choose"]([behind, "bin/python3.12"]) == [("/real/python3.12", 12)]
    assert capsys.readouterr().err == "wheels: skipped bin/python3.12: /real/python3.12 is Python 3.12 too\n"


@pytest.fixture
def notes() -> Callable[[str, str, str], str]:
    function: Callable[[str, str, str], str] = runpy.run_path(str(ROOT / "scripts/release.py"))["notes"]
    return function


CHANGES = "# Changelog\n\n## 0.2.0 (a day)\n\n* New.\n\n## 0.1.0\n\n* Old.\n"


def test_release_notes_are_the_section_of_the_version(notes: Callable[[str, str, str], str]) -> None:
    assert notes("v0.2.0", "0.2.0", CHANGES) == "* New."
    assert notes("v0.1.0", "0.1.0", CHANGES) == "* Old."


def test_release_of_another_version_than_the_tag_says_is_refused(notes: Callable[[str, str, str], str]) -> None:
    with pytest.raises(SystemExit, match=r"the tag is v0\.3\.0, ddp_mp/_version\.py says 0\.2\.0"):
        notes("v0.3.0", "0.2.0", CHANGES)


def test_release_without_notes_is_refused(notes: Callable[[str, str, str], str]) -> None:
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md has no section 0\.2"):
        notes("v0.2", "0.2", CHANGES.replace("0.2.0", "Unreleased"))


def test_version_is_that_of_a_tag_of_this_commit() -> None:
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True)
    assert set(tags.stdout.split()) <= {f"v{ddp_mp.__version__}"}
