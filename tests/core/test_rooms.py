"""Rooms: imports go down, never in a circle; every room says in one sentence what is in it."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("core", "guard", "recipes")
ROOMS = {
    "core": [
        "base", "recipe", "data", "monitoring", "loop", "adapters", "gates", "report", "session", "sweep", "bugs", "commands", "cli",
        "launch",
    ],
    "core.gates": ["causes", "checks"],
    "guard": ["hooks", "measures", "source", "observing", "checks", "rehearsals", "adapters", "commands"],
    "guard.measures": ["models", "data", "losses", "control", "scores", "trainers"],
}  # fmt: skip
"""Rooms of a package, lowest first: a room imports from those before it. Of `core`, each module is in a room; in the others modules beside
them may be on any level."""


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, but for those that only annotations need."""
    tree = ast.parse(path.read_text())
    unread = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in unread:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return {m for m in found if m.startswith("trainworthy.") and m in modules()}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is installed."""
    found = {}
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = ".".join(("trainworthy", *path.relative_to(ROOT).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = path
    return found


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    return {name: imports(path) - {name} for name, path in modules().items()}


def test_no_circle(arrows):
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", ROOMS)
def test_imports_go_down(arrows, package):
    home = f"trainworthy.{package}."

    def level(name: str) -> int:
        room = name.removeprefix(home).split(".")[0] if name.startswith(home) else ""
        return ROOMS[package].index(room) if room in ROOMS[package] or (room and package == "core") else -1

    inside = [(a, b) for a, to in arrows.items() for b in to if level(a) >= 0 and level(b) >= 0]
    assert inside
    up = [f"{a} -> {b}" for a, b in inside if level(b) > level(a)]
    assert not up, "\n".join(up)


def test_core_knows_neither_recipes_nor_guard_and_guard_no_recipes(arrows):
    def between(one: str, other: str) -> list[tuple[str, str]]:
        named = [(a, b) for a, to in arrows.items() for b in to]
        return [(a, b) for a, b in named if a.startswith(f"trainworthy.{one}") and b.startswith(f"trainworthy.{other}")]

    assert between("core", "recipes") == between("core", "guard") == between("guard", "recipes") == []
    assert between("guard", "core")


def test_every_room_says_what_it_is():
    for path in modules().values():
        if path.name == "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text()))
            assert doc, path


def test_modules_and_functions_are_short():
    """A module has at most 400 lines; a function, without its docstring, at most 60, or a comment `# long: why` on its `def`."""
    long = []
    for path in (path for package in ("core", "guard") for path in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        if len(lines) > 400:
            long.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not node.end_lineno:
                continue
            documented = ast.get_docstring(node) is not None
            doc = node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
            if node.end_lineno - node.lineno + 1 - doc > 60 and "# long:" not in lines[node.lineno - 1]:
                long.append(f"{path.relative_to(ROOT)}: {node.name}, {node.end_lineno - node.lineno + 1 - doc} lines")
    assert not long, "\n".join(long)
