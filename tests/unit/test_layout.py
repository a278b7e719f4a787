"""Files of csrc and of ddp_mp refer to each other without circles, and a folder only to those below it."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_mp

ROOT = Path(__file__).parents[2]
Graph = dict[str, set[str]]

#: What a folder of csrc may include, beside itself.
BELOW = {
    "core": set[str](),
    "host": {"core"},
    "cuda": {"core"},
    "python": {"core", "host", "cuda"},
}


def includes(folder: Path) -> Graph:
    """Each unit, which is a header with its source, and the units that it includes."""
    graph: Graph = {}
    for path in sorted(folder.rglob("*.[ch]")) + sorted(folder.rglob("*.cu*")):
        unit = path.relative_to(folder).with_suffix("").as_posix()
        named = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
        graph.setdefault(unit, set()).update(name.rsplit(".", 1)[0] for name in named if (folder / name).exists())
        graph[unit].discard(unit)
    return graph


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Names of modules that code of the package imports when it runs: not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            yield from imported(node, package)


def imports(folder: Path) -> Graph:
    """Each module of the package, and those that it imports."""
    graph: Graph = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        graph[".".join(parts)] = set(imported(ast.parse(path.read_text()), ".".join(parts[:-1])))
    return {name: {other for other in others if other in graph} for name, others in graph.items()}


def require_no_circle(graph: Graph) -> None:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("a circle: " + " -> ".join(reversed(error.args[1])))


def test_layout_of_csrc_has_no_circle() -> None:
    graph = includes(ROOT / "csrc")
    assert len(graph) > 15
    require_no_circle(graph)


def test_layout_of_ddp_mp_has_no_circle() -> None:
    graph = imports(ROOT / "ddp_mp")
    assert len(graph) > 15
    require_no_circle(graph)


def test_layout_of_csrc_folders_goes_one_way() -> None:
    for unit, included in includes(ROOT / "csrc").items():
        folder = unit.split("/")[0]
        above = {other for other in included if other.split("/")[0] not in {folder, *BELOW[folder]}}
        assert not above, f"{unit} includes {sorted(above)}"


def test_layout_circle_is_seen() -> None:
    with pytest.raises(pytest.fail.Exception, match="a circle: "):
        require_no_circle({"a": {"b"}, "b": {"a"}})


def test_layout_of_tests_names_private_modules_in_one_file() -> None:
    public = {"ddp_mp", "ddp_mp.options", "ddp_mp._version"}
    private = {"_C", *(path.stem for path in (ROOT / "ddp_mp").glob("[a-z]*.py"))} - set(ddp_mp.__all__)
    named = {
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ddp_mp"
        if not (node.module or "").startswith("ddp_mp.tools")
        if node.module not in public or any(alias.name in private for alias in node.names)
    }
    assert named == {"inside.py", "test_cuda_streams.py"}
