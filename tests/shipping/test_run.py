"""``python -m ddp_mp run``: the program runs as Python runs it, and its models and those of its children are patched."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_mp.options import Options
from ddp_mp.tools import run as tool

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, subprocess, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def report(index, path, where):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    import ddp_mp
    said = {"patched": ddp_mp.is_patched(ddp), "type": str(ddp(torch.ones(1, 2)).dtype), "argv": sys.argv}
    said |= {"main": __name__, "path": sys.path[0], "first": str(ddp._ddp_mp.precision)}
    dist.destroy_process_group()
    with open(path, "w") as file:
        json.dump(said, file)


if __name__ == "__main__":
    where, path = sys.argv[1], sys.argv[2]
    if where == "here":
        report(0, path, where)
    elif where == "spawned":
        mp.spawn(report, (path, where), nprocs=1)
    else:
        subprocess.run([sys.executable, __file__, "here", path], check=True)
"""


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_MP_")}
    env = {**clean, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "ddp_mp", "run", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.long
@pytest.mark.parametrize("where", ["here", "spawned", "command"])
@pytest.mark.parametrize("as_module", [False, True])
def test_run_patches_the_model_of_the_program_and_of_its_children(where: str, as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = ["-m", "program"] if as_module else [str(tmp_path / "program.py")]
    result = run("--param-dtype", "float16", *program, where, "said.json", "--prefetch", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["patched"]
    assert said["type"] == "torch.float16"
    assert "reduce_dtype=torch.float32" in said["first"]
    if where == "here":
        assert said["argv"] == [str(tmp_path / "program.py"), "here", "said.json", "--prefetch"]
        assert said["main"] == "__main__"
        assert Path(said["path"]) == tmp_path


@pytest.mark.long
def test_run_reads_variables_and_options_win(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    variables = {"DDP_MP_PARAM_DTYPE": "float16", "DDP_MP_REDUCE_DTYPE": "bfloat16"}
    result = run("--param-dtype", "bfloat16", "program.py", "here", "said.json", cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["type"], "reduce_dtype=torch.bfloat16" in said["first"]) == ("torch.bfloat16", True)


def test_child_executes_the_sitecustomize_behind_ours_and_survives_a_look_for_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = True")
    program = (
        "import importlib.util, sys; importlib.util.find_spec('torch'); import torch; "
        "import torch.nn.parallel as p; import ddp_mp.installing as i; "
        "print(sys.theirs, i._constructor.defaults.precision.param_dtype, any('children' in path for path in sys.path))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    tool.tell_children({}, environment)
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)
    assert result.stdout == "True torch.bfloat16 False\n", result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--param-dtype", "bf16", "x.py"], "--param-dtype: expected one of float64, float32, bfloat16, float16, none"),
        (["--nothing", "x.py"], "unrecognized arguments: --nothing"),
        (["no_such_file.py"], "there is no file 'no_such_file.py'"),
        (["-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["--full-precision", "torch.nn:Nothing", __file__], "there is no class 'torch.nn:Nothing'"),
        (["--full-precision-outputs", "head", __file__], "names some of full_precision_modules, which is empty"),
        ([], "a script is missing"),
    ],
)
def test_run_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(tool, "install", lambda *args, **kwargs: None)
    with pytest.raises(SystemExit) as left:
        tool.main(arguments)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_every_option_has_its_flag_with_a_help_text() -> None:
    flags = {flag.field: flag for flag in tool.flags()}
    assert set(flags) == {*tool.PRECISION, *(field.name for field in dataclasses.fields(Options))}
    assert all(len(flag.help) > 20 for flag in flags.values())
