"""``python -m ddp_mp bench``: each way to say what is timed, and what is said when that leads nowhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_mp.tools import bench, measure, shapes, show

ROOT = Path(__file__).parents[2]

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, tied=False, frozen=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6)
        if tied:
            self.last.weight = self.first.weight
        self.first.bias.requires_grad_(not frozen)

    def forward(self, x, *, scale):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"out": self.last(x) * scale, "count": torch.tensor(3)}


class Shop:
    net = Net


def net(): return Net()
def tied(): return Net(tied=True)
def frozen(): return Net().requires_grad_(False)
def broken(): raise ValueError("no such thing")
def number(): return 7
def lazy(): return nn.LazyLinear(3)
def complex_net(): return nn.ParameterList([torch.zeros(3, dtype=torch.complex64)])
def positional(): return (torch.randn(2, 6),)
def by_name(): return {"x": torch.randn(2, 6), "scale": 2}
def linear(): return nn.Sequential(nn.Linear(6, 6), nn.Identity())
def single(): return torch.randn(2, 6)


class Silent(Net):
    def forward(self, x): return x


value = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's."""
    (tmp_path / "bench_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    yield "bench_models"
    sys.modules.pop("bench_models", None)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_mp", "bench", "--device", "cpu", "--rounds", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def table_of(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr[-4000:]
    assert "root" in result.stdout
    return " ".join(result.stdout.split())  # a narrow terminal breaks the title


@pytest.mark.long
def test_bench_without_options_times_a_gpt() -> None:
    text = table_of(run("--layers", "1"))
    assert "a GPT of 1 layers, 32 wide" in text
    assert "pytorch" in text
    assert "times as long as ddp_mp's" in text


@pytest.mark.long
def test_bench_shapes_times_an_architecture() -> None:
    text = table_of(run("--shapes", "gpt2"))
    assert "gpt2, tiny sizes" in text
    assert "148 parameters" in text
    assert "times as long" in text


@pytest.mark.long
def test_bench_model_alone_times_a_stand_in(models: str) -> None:
    text = table_of(run("--model", f"{models}:Shop.net", "--real-size"))
    assert f"a stand-in for {models}:Shop.net, real sizes" in text
    assert "10 parameters" in text
    assert "times as long" in text


@pytest.mark.long
def test_bench_tied_model_says_why_pytorch_is_left_out(models: str) -> None:
    text = table_of(run("--model", f"{models}:tied"))
    assert "9 parameters" in text
    assert "PyTorch's own hooks cannot train this model: RuntimeError: Expected to mark a variable ready only once" in text
    assert "times as long" not in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "given", "parameters"), [("net", "by_name", 10), ("linear", "positional", 2), ("linear", "single", 2)]
)
def test_bench_model_with_input_runs_its_own_forward(models: str, model: str, given: str, parameters: int) -> None:
    text = table_of(run("--model", f"{models}:{model}", "--input", f"{models}:{given}"))
    assert f"{models}:{model} on {models}:{given}" in text
    assert f"{parameters} parameters" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nothing"], "--model: expected package.module:callable, found 'nothing'"),
        (["--model", ":net"], "--model: expected package.module:callable, found ':net'"),
        (["--model", "no_such_module:net"], "--model: cannot import 'no_such_module': ModuleNotFoundError"),
        (["--model", "bench_models:nobody"], "--model: 'bench_models' has no 'nobody'"),
        (["--model", "bench_models:Shop.nobody"], "--model: 'bench_models' has no 'Shop.nobody'"),
        (["--model", "bench_models:value"], "--model: 'bench_models:value' is not callable, but of type int"),
        (["--model", "bench_models:broken"], "--model: bench_models:broken raised ValueError: no such thing"),
        (["--model", "bench_models:number"], "--model: expected bench_models:number to return a torch.nn.Module, found int"),
        (["--model", "bench_models:frozen"], "bench_models:frozen returned a module without a parameter that is trained"),
        (["--model", "bench_models:lazy"], "--model: bench_models:lazy: parameter 'weight' has no shape yet"),
        (["--model", "bench_models:complex_net"], "parameter '0' is torch.complex64"),
        (["--model", "bench_models:net", "--input", "bench_models:nobody"], "--input: 'bench_models' has no 'nobody'"),
        (["--model", "bench_models:net", "--input", "bench_models:broken"], "--input: bench_models:broken raised ValueError"),
        (
            ["--model", "bench_models:net", "--input", "bench_models:positional"],
            "--input: bench_models:net on bench_models:positional: TypeError: ",
        ),
        (
            ["--model", "bench_models:Silent", "--input", "bench_models:single"],
            "--input: the forward returned no tensor with a gradient",
        ),
    ],
)
def test_bench_wrong_spec_is_an_error_by_name(
    models: str, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert bench.main(["--device", "cpu", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "gpt7"], "gpt2_xl"),
        (["--shapes", "gpt2", "--model", "a:b"], "not allowed with"),
        (["--input", "a:b"], "--input needs --model"),
        (["--layers", "0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--width", "3"], "multiple of 2"),
        (["--width", "0"], "multiple of 2"),
        (["--shapes", "gpt2", "--layers", "2"], "those of the GPT"),
        (["--tiny"], "need --shapes"),
        (["--model", "a:b", "--input", "a:c", "--real-size"], "--model without --input"),
        (["--shapes", "gpt2", "--tiny", "--real-size"], "not allowed with"),
    ],
)
def test_bench_contradicting_options_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main(arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_bench_on_a_terminal_shows_progress() -> None:
    pytest.importorskip("tqdm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "ddp_mp", "bench", "--device", "cpu", "--rounds", "3", "--layers", "1"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, timeout=120)
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # a terminal that nobody writes to any more
        while data := os.read(ours, 1 << 16):
            shown += data.decode()
    os.close(ours)
    assert result.returncode == 0
    assert "3/3" in shown


def test_progress_without_tqdm_goes_through_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "installed", lambda name: False)
    assert list(show.progress(range(3), visible=True)) == [0, 1, 2]


def test_paired_progress_goes_through_every_round() -> None:
    seen: list[int] = []

    def watched(rounds: range):
        for number in rounds:
            seen.append(number)
            yield number

    values = measure.paired({"a": lambda: {"x": 1.0}, "b": lambda: {"x": 2.0}}, 4, progress=watched)
    assert seen == [0, 1, 2, 3]
    assert values == {"a": {"x": [1.0] * 4}, "b": {"x": [2.0] * 4}}


class Original(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 96)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96)) for _ in range(2))
        self.extra = nn.ParameterList([torch.zeros(5)])
        self.again = self.blocks[0]
        self.head = nn.Linear(96, 100, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(96, 100)
        self.out.weight = self.embedding.weight
        self.blocks[1][0].bias.requires_grad_(False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_stand_in_has_names_shapes_types_and_ties(device: str) -> None:
    with torch.device(device):
        original = Original()
    twin = shapes.stand_in(original, real_size=True)

    def described(module: nn.Module) -> list[tuple[object, ...]]:
        named = module.named_parameters(remove_duplicate=False)
        return [(name, p.shape, p.dtype, p.requires_grad) for name, p in named]

    assert described(twin) == described(original)
    assert [name for name, _ in twin.named_modules()] == [name for name, _ in original.named_modules()]
    assert twin.out.weight is twin.embedding.weight
    assert twin.again is twin.blocks.get_submodule("0")


def test_stand_in_gives_every_trained_parameter_a_gradient() -> None:
    twin = shapes.stand_in(Original())
    assert max(max(p.shape) for p in twin.parameters()) <= 64
    shapes.loss_of(twin, torch.device("cpu")).backward()
    assert all((p.grad is not None) == p.requires_grad for p in twin.parameters())
