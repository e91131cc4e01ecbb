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
NUMBERS: dict[str, tuple[type, str]] = {"int": (int, "a whole number"), "float": (float, "a number")}
BUILT_IN = {"str", "int", "float", "bool", "object"}
Known = ast.stmt | tuple[Path, str]
"""A definition, or the file and the name that an import takes; no name: the module itself."""
STANDARD = (Path(), "")
"""Stands for what Python's own library defines."""


class Unresolved(Exception):
    """The source does not show which settings there are."""


def assert_settings(entry: Entry, argv: list[str], options: str, *, command: str) -> None:
    """Raise UserError for a word of `argv` that is no setting of the recipe and no option in the text `options`, and for a
    number that is none."""
    try:
        kinds = names(entry.path)
    except (Unresolved, SyntaxError, UnicodeDecodeError):
        return
    kinds.setdefault("max-steps", "int")
    known = {*kinds, *ALWAYS, *re.findall(r"--([a-z][a-z-]*[a-z])", options)}
    config.assert_known(argv, known, prog=command, settings=kinds)
    for word, following in pairwise([*argv, ""]):
        flag, equals, value = word.partition("=")
        kind, value = kinds.get(flag[2:].replace("_", "-"), ""), value if equals else following
        if not (flag.startswith("--") and value and kind in NUMBERS):
            continue
        read, what = NUMBERS[kind]
        try:
            read(value)
        except ValueError:
            raise UserError(f"{flag} needs {what}", got=value, needed=what, next=f"{command} --help") from None


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
        found |= _fields(*_class(path, ast.unparse(base)))
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
    found = _find(path, ast.unparse(kind))
    if found is None or isinstance(getattr(found[1], "value", None), (ast.Subscript, ast.BinOp)):
        return None
    home, node = found
    if not isinstance(node, ast.ClassDef):  # what a call returns may be a group
        raise Unresolved(ast.unparse(kind))
    return (home, node) if any("dataclass" in ast.unparse(d) for d in node.decorator_list) else None


def _class(path: Path, name: str) -> tuple[Path, ast.ClassDef]:
    found = _find(path, name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        raise Unresolved(name)
    return found[0], found[1]


def _find(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """Return (file, definition) of a name in a file, such as `Train` or `config.Train`; None for what is Python's own."""
    for _ in range(10):  # names that are passed on
        first, _, rest = name.partition(".")
        found = _names_of(path).get(first)
        if first in BUILT_IN or found == STANDARD:
            return None
        if isinstance(found, ast.stmt) and not rest:
            return path, found
        if not isinstance(found, tuple):
            break
        path, name = found[0], ".".join(filter(None, (found[1], rest)))
    raise Unresolved(name)


@cache
def _names_of(path: Path) -> dict[str, Known | None]:
    """Return what each name at the top level of a file is."""
    found: dict[str, Known | None] = {}
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
                a.asname or a.name: (_module(path, a.name) or STANDARD[0], "")
                for a in line.names
                if a.asname or "." not in a.name
            }
    return found


def _imported(path: Path, module: str, name: str) -> Known | None:
    """Return where an imported name is defined; None if its file cannot be found."""
    if inner := _module(path, f"{module}.{name}"):
        return inner, ""
    if home := _module(path, module):
        return home, name
    return STANDARD if module.split(".")[0] in sys.stdlib_module_names else None


def _module(path: Path, dotted: str) -> Path | None:
    """Return the file of a module of this package, or next to the recipe."""
    first, *rest = dotted.split(".")
    root = HOME.parent.joinpath(*rest) if first == "trainworthy" else path.parent.joinpath(first, *rest)
    return next((p for p in (root.with_suffix(".py"), root / "__init__.py") if p.is_file()), None)
