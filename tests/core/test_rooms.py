"""Rooms: imports go down, never in a circle; every room says in one sentence what is in it."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = [
    "base",
    "recipe",
    "data",
    "monitoring",
    "loop",
    "gates",
    "report",
    "session",
    "sweep",
    "guard",
    "adapters",
    "bugs",
    "commands",
    "cli",
    "launch",
]
"""Of core, lowest first: a room imports from those before it."""
INNER = {"gates": ["causes", "checks"], "guard": ["hooks", "measures", "observing", "checks", "rehearsals"]}
"""Rooms inside a room, lowest first. Modules beside them may be on any level."""


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
    for path in [*(ROOT / "core").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
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


def test_core_imports_go_down(arrows):
    def room(name: str) -> int:
        return ROOMS.index(name.split(".")[2])

    inside = {a: {b for b in to if b.count(".") > 1} for a, to in arrows.items() if a.startswith("trainworthy.core.")}
    up = [
        f"{a} -> {b}" for a, to in inside.items() for b in to if b.startswith("trainworthy.core.") and room(b) > room(a)
    ]
    assert not up, "\n".join(up)


@pytest.mark.parametrize("room", INNER)
def test_imports_inside_a_room_go_down(arrows, room):
    home = f"trainworthy.core.{room}."

    def level(name: str) -> int:
        inner = name.removeprefix(home).split(".")[0] if name.startswith(home) else ""
        return INNER[room].index(inner) if inner in INNER[room] else -1

    inside = [(a, b) for a, to in arrows.items() for b in to if level(a) >= 0 and level(b) >= 0]
    assert inside
    up = [f"{a} -> {b}" for a, b in inside if level(b) > level(a)]
    assert not up, "\n".join(up)


def test_core_knows_no_recipe(arrows):
    assert not [
        (a, b) for a, to in arrows.items() for b in to if a.startswith("trainworthy.core") and "recipes" in b.split(".")
    ]


def test_every_room_says_what_it_is():
    for path in modules().values():
        if path.name == "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text()))
            assert doc, path


def test_modules_and_functions_of_core_are_short():
    """A module has at most 400 lines; a function, without its docstring, at most 60, or a comment `# long: why` on its `def`."""
    long = []
    for path in (ROOT / "core").rglob("*.py"):
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
