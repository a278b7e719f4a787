"""``python -m ddp_mp``: the commands that there are, and what the package does without them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import ddp_mp
from ddp_mp import __main__ as command_line
from ddp_mp.tools import demo, show
from ddp_mp.tools.command import Parser

PACKAGE = Path(__file__).parents[2] / "ddp_mp"


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main([command, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m ddp_mp {command} ")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"ddp_mp {ddp_mp.__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name:<6} {text}\n" in said for name, text in command_line.COMMANDS.items())


@pytest.mark.parametrize(("arguments", "said"), [(["nothing"], "there is no command 'nothing'; ")])
def test_wrong_command_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(arguments)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_every_option_has_a_help_text(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers: list[Parser] = []
    original = Parser.parse_args
    monkeypatch.setattr(Parser, "parse_args", lambda self, *args: (parsers.append(self), original(self, *args))[1])
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    options = [action for action in parsers[-1]._actions if action.dest != "program"]
    assert parsers[-1].prog.endswith(command)
    assert all(action.help for action in options)


def test_demo_that_cannot_write_is_refused_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(SystemExit) as left:
            demo.main(["--output", str(place)])
        assert left.value.code == 2
        error = capsys.readouterr().err
        assert f"--output {place}: nothing can be written there" in error
        assert error.count("\n") == 1
    assert demo.not_writable(tmp_path / "new" / "folder") == ""
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_info_says_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command_line.main(["info"]) == 0
    assert "none: PyTorch finds no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 200])
def test_table_fits_the_terminal(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "installed", lambda name: False)
    monkeypatch.setattr(show, "terminal_columns", lambda: columns)
    show.show_table("title", ("", "first", "second"), [("row", "1" * 20, "2" * 30)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(columns, 40)
    assert len(lines) == (3 if columns == 200 else 4)
    assert any("1" * 20 in line and "first" in line for line in lines) == (columns == 40)


@pytest.mark.parametrize("command", ["info", "check"])
def test_command_refuses_what_it_does_not_know(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main([command, "--nothing"])
    assert left.value.code == 2
    assert "unrecognized arguments: --nothing" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(set(PACKAGE.glob("*.py")) - {PACKAGE / "__main__.py"}), ids=lambda path: path.name)
def test_nothing_outside_of_tools_imports_them(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        from_where = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        assert not any("tools" in f"{from_where}.{name}".split(".") for name in names), ast.unparse(node)
