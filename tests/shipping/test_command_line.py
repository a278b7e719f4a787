"""``python -m ddp_mp``: the commands that there are, and what the package does without them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ddp_mp import __main__ as command_line

PACKAGE = Path(__file__).parents[2] / "ddp_mp"


@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main([command, "--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m ddp_mp {command} ")


@pytest.mark.parametrize("command", ["info", "check"])
def test_command_refuses_what_it_does_not_know(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main([command, "--nothing"])
    assert left.value.code == 2
    assert "unrecognized arguments: --nothing" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_nothing_outside_of_tools_imports_them(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        from_where = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        assert not any("tools" in f"{from_where}.{name}".split(".") for name in names), ast.unparse(node)
