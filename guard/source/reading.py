"""A script with its own modules: their syntax trees, the names that they read, and the nodes, scopes and calls that rules look at."""

import ast
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainworthy.guard.source.nodes import FUNCTIONS, blocks, tail, variable
from trainworthy.guard.source.reached import Calls

FILES = 40
INDIRECT = ("locals", "globals", "vars", "eval", "exec")


@dataclass
class Source:
    """A script, with the modules of its folder that it imports."""

    trees: dict[str, ast.Module] = field(default_factory=dict)
    """File name, as the user sees it -> tree."""
    known: set[str] = field(default_factory=set)
    """Names that any file reads."""
    dropped: list[tuple[str, ast.stmt]] = field(default_factory=list)
    """Functions and classes that nothing names, with their files."""
    argv: list[str] = field(default_factory=list)
    """The arguments that the script is started with."""
    kinds: dict[tuple[type, ...], list[tuple[str, Any]]] = field(default_factory=dict)
    """What `of` has found."""

    @functools.cached_property
    def nodes(self) -> list[tuple[str, ast.AST]]:
        """Every node with its file's name."""
        return [(name, node) for name, tree in self.trees.items() for node in ast.walk(tree)]

    def of(self, *kinds: type) -> list[tuple[str, Any]]:
        """Return the nodes of these kinds, in the order of all, with their files' names."""
        if kinds not in self.kinds:
            self.kinds[kinds] = [(name, node) for name, node in self.nodes if isinstance(node, kinds)]
        return self.kinds[kinds]

    @property
    def functions(self) -> list[tuple[str, Any]]:
        """Every function with its file's name."""
        return self.of(*FUNCTIONS)

    @property
    def scopes(self) -> list[tuple[str, Any]]:
        """Every module and function with its file's name."""
        return self.of(ast.Module, *FUNCTIONS)

    @property
    def plain_scopes(self) -> list[tuple[str, Any]]:
        """Every module and function of a script that reads its variables by name alone; none of another. `vars(x)` reads an object's."""
        indirect = (n for _, n in self.of(ast.Call) if variable(n.func) in INDIRECT)
        return [] if any(variable(n.func) != "vars" or not n.args for n in indirect) else self.scopes

    @functools.cached_property
    def blocks(self) -> list[tuple[str, list[ast.stmt]]]:
        """Every block of statements with its file's name."""
        return [(name, block) for name, node in self.nodes for block in blocks(node)]

    @functools.cached_property
    def calls(self) -> Calls:
        """The calls of the script's own functions and classes."""
        return Calls(self.trees, self.nodes)


def read(script: Path, entry: str = "") -> Source:
    """Read a script and the modules that it imports from its folder, from the folder of its package, and from the working directory. A file
    that is no Python is left out. `entry`: a function of the script that is called from elsewhere."""
    package = script.parent
    while (package / "__init__.py").is_file() and package != package.parent:
        package = package.parent
    homes = list(dict.fromkeys((script.parent, package, Path.cwd())))
    found, due, done = Source(), [script], set()
    while due and len(found.trees) < FILES:
        path = due.pop(0)
        if path in done:
            continue
        done.add(path)
        home = next((h for h in homes if path.is_relative_to(h)), path.parent)
        name = str(path.relative_to(home))
        name = name if name not in found.trees else str(path)
        try:
            found.trees[name] = ast.parse(path.read_text())
        except (OSError, SyntaxError, ValueError):
            continue
        due += [p for p in imported(found.trees[name], path, homes) if p.is_file()]
    nodes = [n for tree in found.trees.values() for n in ast.walk(tree)]
    found.known = names_in(nodes) | {a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    found.known |= {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    found.known |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    prune(found, entry)
    return found


def prune(source: Source, entry: str) -> None:
    """Leave out functions and classes that nothing names, from what is run on import and from `entry` on: this script does not use them."""
    defined: dict[str, list[ast.stmt]] = {}
    due: list[ast.AST] = []
    for tree in source.trees.values():
        for line in tree.body:
            if isinstance(line, (*FUNCTIONS, ast.ClassDef)):
                defined.setdefault(line.name, []).append(line)
                due += line.decorator_list
            else:
                due.append(line)
    live = {id(one) for one in defined.get(entry, ())}
    due += defined.pop(entry, ())
    while due:
        for node in ast.walk(due.pop()):
            for one in defined.pop(tail(node), ()):
                live.add(id(one))
                due.append(one)
    for name, tree in source.trees.items():
        idle = [n for n in tree.body if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and id(n) not in live]
        source.dropped += [(name, n) for n in idle]
        tree.body = [n for n in tree.body if n not in idle]


def names_in(nodes: list[ast.AST]) -> set[str]:
    """Return the names that nodes read, or that they declare for another scope."""
    found = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)}
    return found | {n for g in nodes if isinstance(g, (ast.Global, ast.Nonlocal)) for n in g.names}


def imported(tree: ast.Module, path: Path, homes: list[Path]) -> list[Path]:
    """Return the files below `homes` that a module may import."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bases = [home / a.name.replace(".", "/") for home in homes for a in node.names]
            found += [path for base in bases for path in (base.with_name(f"{base.name}.py"), base / "__init__.py")]
        elif isinstance(node, ast.ImportFrom):
            for home in homes if not node.level else [path.parents[min(node.level, len(path.parents)) - 1]]:
                base = home / (node.module or "").replace(".", "/")
                found += [
                    *([base.with_suffix(".py")] if node.module else []),
                    base / "__init__.py",
                    *(base / f"{a.name}.py" for a in node.names),
                ]
    return [p for p in found if "site-packages" not in p.parts]
