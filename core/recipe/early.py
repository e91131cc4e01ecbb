"""Finds typing errors in settings and gates from the source alone, before the slow import of torch and before data are read.

What the source does not show is left to the command itself, which has the loaded recipe.
"""

import ast
import re
import sys
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

from trainworthy.core.base import config
from trainworthy.core.base.errors import UserError
from trainworthy.core.recipe.registry import HOME, Entry

ALWAYS = {"help", "preset", "config", "init-from", "max-steps", "shard"}
"""Options that every command of a recipe takes."""
GATE = re.compile(r"""\bgate\(\s*f?["']([a-z][a-z0-9-]*)["'{]""")  # also f"probe-{name}"
FROM = re.compile(r"^\s*from (trainworthy\.recipes[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
QUOTED = re.compile(r"""["']([a-z][a-z0-9-]*)["'{]""")


class Unresolved(Exception):
    """The source does not show which settings there are."""


def assert_settings(entry: Entry, argv: list[str], options: str, *, command: str) -> None:
    """Raise UserError for a word of `argv` that is no setting of the recipe and no option in the text `options`, and for a
    number that is none."""
    try:
        kinds = names(entry.path)
    except (Unresolved, SyntaxError, UnicodeDecodeError):
        return
    known = {*kinds, *ALWAYS, *re.findall(r"--([a-z][a-z-]*[a-z])", options)}
    config.assert_known(argv, known, prog=command, settings=kinds)
    for word, following in pairwise([*argv, ""]):
        flag, equals, value = word.partition("=")
        kind, value = kinds.get(flag[2:].replace("_", "-"), ""), value if equals else following
        if flag.startswith("--") and value and kind in NUMBERS and not _reads(value, NUMBERS[kind]):
            what = "a whole number" if kind == "int" else "a number"
            raise UserError(f"{flag} needs {what}", got=value, needed=what, next=f"{command} --help")


def assert_gates(entry: Entry, chosen: Iterable[str]) -> None:
    """Raise UserError for a gate that no source of a packaged recipe names. A fork may get its gates from anywhere."""
    if HOME not in entry.path.parents:
        return
    files = {*_reached(entry.path), *(HOME.parent / "core" / "gates").rglob("*.py")}
    sources = [path.read_text(encoding="utf-8") for path in files]
    quoted = {name for text in sources for name in QUOTED.findall(text)}
    old = {name for table in config.of_recipes("renamed").values() for name in table}
    for name in chosen:
        known = _completed({gate for text in sources for gate in GATE.findall(text)}, quoted)
        if name not in _completed(quoted, quoted) | old:
            raise config.unknown(f"gate '{name}'", name, known, next=f"trainworthy check {entry.id}")


def _reached(path: Path) -> set[Path]:
    """Return the files of recipes that a recipe imports, itself among them, wherever the import is."""
    found, left = set(), [path]
    while left:
        now = left.pop()
        if now in found or HOME not in now.parents:
            continue
        found.add(now)
        left += _imports(now)
    return found


@cache
def _imports(path: Path) -> list[Path]:
    """Return the files of recipes that a file names in its imports."""
    found = []
    for module, names in FROM.findall(path.read_text(encoding="utf-8")):
        parts = [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
        found += [p for part in parts if (p := _module(path, part)) is not None]
    return found


def _completed(names: set[str], ends: set[str]) -> set[str]:
    """Return the names; each that ends with a hyphen is the beginning of names."""
    begun = {name for name in names if name.endswith("-")}
    return (names - begun) | {first + last for first in begun for last in ends}


NUMBERS: dict[str, type] = {"int": int, "float": float}


def _reads(value: str, kind: type) -> bool:
    try:
        kind(value)
    except ValueError:
        return False
    return True


def names(path: Path) -> dict[str, str]:
    """Return {name on the command line: its annotation} of the `Config` in a recipe's file. Raises Unresolved if a part of it is not in
    a source that can be found."""
    return _flags(*_class(path, "Config"), prefix="")


def _flags(path: Path, node: ast.ClassDef, prefix: str) -> dict[str, str]:
    found = {}
    for name, (home, kind) in _fields(path, node).items():
        flag = prefix + name.replace("_", "-")
        group = _group(home, kind)
        if group is not None:
            found |= _flags(*group, prefix=f"{flag}.")
            continue
        found[flag] = ast.unparse(kind)
        if found[flag] == "bool":
            found[f"{prefix}no-{name.replace('_', '-')}"] = ""
    return found


def _fields(path: Path, node: ast.ClassDef) -> dict[str, tuple[Path, ast.expr]]:
    """Return {field: (file, annotation)} of a dataclass and of its bases, the nearest last."""
    found = {}
    for base in reversed(node.bases):
        found |= _fields(*_resolved_class(path, base))
    for line in node.body:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if "ClassVar" not in ast.unparse(line.annotation):
            found[line.target.id] = path, line.annotation
    return found


def _group(path: Path, kind: ast.expr) -> tuple[Path, ast.ClassDef] | None:
    """Return the dataclass that an annotation names: a group of settings. None for the type of one value."""
    if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
        kind = ast.parse(kind.value, mode="eval").body
    if not isinstance(kind, (ast.Name, ast.Attribute)):  # Literal[...], a | b, tuple[...]
        return None
    place = _place(path, kind)
    if place is None:
        return None
    node = _definition(*place)
    if not isinstance(node, ast.ClassDef):
        value = getattr(node, "value", None)
        if not isinstance(value, (ast.Subscript, ast.BinOp)):  # what a call returns may be a group
            raise Unresolved(ast.unparse(kind))
        return None
    grouped = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    return (_home(*place), node) if grouped else None


def _resolved_class(path: Path, expression: ast.expr) -> tuple[Path, ast.ClassDef]:
    place = _place(path, expression)
    if place is None:
        raise Unresolved(ast.unparse(expression))
    return _class(*place)


def _class(path: Path, name: str) -> tuple[Path, ast.ClassDef]:
    node = _definition(path, name)
    if not isinstance(node, ast.ClassDef):
        raise Unresolved(name)
    return _home(path, name), node


def _definition(path: Path, name: str) -> ast.stmt:
    """Return the statement that defines a name, wherever it was imported from."""
    found = _names_of(_home(path, name)).get(_own_name(path, name))
    if not isinstance(found, ast.stmt):
        raise Unresolved(f"{name} in {path}")
    return found


def _home(path: Path, name: str) -> Path:
    """Return the file that defines a name which `path` has."""
    return _origin(path, name)[0]


def _own_name(path: Path, name: str) -> str:
    return _origin(path, name)[1]


def _origin(path: Path, name: str) -> tuple[Path, str]:
    for _ in range(10):  # names that are passed on
        found = _names_of(path).get(name)
        if not isinstance(found, tuple) or found[1] is None:
            return path, name
        path, name = found[0], found[1]
    raise Unresolved(name)


def _place(path: Path, expression: ast.expr) -> tuple[Path, str] | None:
    """Return (file, name) of what an expression names; None for a type of Python."""
    if isinstance(expression, ast.Name):
        if expression.id in BUILT_IN:
            return None
        found = _names_of(path).get(expression.id)
        if found is None:
            raise Unresolved(expression.id)
        return None if found == STANDARD else (path, expression.id)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        found = _names_of(path).get(expression.value.id)
        if found == STANDARD:
            return None
        if isinstance(found, tuple) and found[1] is None:  # a module
            return found[0], expression.attr
    raise Unresolved(ast.unparse(expression))


BUILT_IN = {"str", "int", "float", "bool", "object"}
STANDARD = (Path(), None)
"""Stands for what Python's own library defines."""
Known = ast.stmt | tuple[Path, str | None]
"""A definition, or the file and the name that an import takes; no name: the module itself."""


@cache
def _names_of(path: Path) -> dict[str, Known]:
    """Return what each name at the top level of a file is."""
    found: dict[str, Known] = {}
    statements = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while statements:
        line = statements.pop(0)
        if isinstance(line, ast.If):  # `if TYPE_CHECKING:`
            statements += line.body
        elif isinstance(line, (ast.ClassDef, ast.FunctionDef)):
            found[line.name] = line
        elif isinstance(line, ast.Assign):
            found |= {t.id: line for t in line.targets if isinstance(t, ast.Name)}
        elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found[line.target.id] = line
        elif isinstance(line, ast.ImportFrom) and line.module and not line.level:
            found |= {a.asname or a.name: _imported(path, line.module, a.name) for a in line.names}
        elif isinstance(line, ast.Import):
            found |= {
                a.asname or a.name: (_module(path, a.name) or STANDARD[0], None)
                for a in line.names
                if a.asname or "." not in a.name
            }
    return found


def _imported(path: Path, module: str, name: str) -> Known:
    inner = _module(path, f"{module}.{name}")
    if inner is not None:
        return inner, None
    home = _module(path, module)
    if home is not None:
        return home, name
    return STANDARD if module.split(".")[0] in sys.stdlib_module_names else (Path("?"), None)


def _module(path: Path, dotted: str) -> Path | None:
    """Return the file of a module of this package, or next to the recipe."""
    first, *rest = dotted.split(".")
    root = HOME.parent.joinpath(*rest) if first == "trainworthy" else path.parent.joinpath(first, *rest)
    return next((p for p in (root.with_suffix(".py"), root / "__init__.py") if p.is_file()), None)
