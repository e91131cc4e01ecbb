"""Reads a script's source: its own files, its functions and their parameters, its names and where they are read."""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FILES = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)


@dataclass
class Source:
    """A script, with the modules of its folder that it imports."""

    trees: dict[str, ast.Module] = field(default_factory=dict)
    """File name, as the user sees it -> tree."""
    known: set[str] = field(default_factory=set)
    """Names that any file reads."""
    dropped: list[tuple[str, ast.stmt]] = field(default_factory=list)
    """Functions and classes that nothing names, with their files."""

    @functools.cached_property
    def nodes(self) -> list[tuple[str, ast.AST]]:
        """Every node with its file's name."""
        return [(name, node) for name, tree in self.trees.items() for node in ast.walk(tree)]


def read(script: Path) -> Source:
    """Read a script and the modules that it imports from its folder, from the folder of its package, and from the working directory. A file
    that is no Python is left out."""
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
    prune(found)
    return found


def prune(source: Source) -> None:
    """Leave out functions and classes that nothing names, from what is run on import on: this script does not use them."""
    defined: dict[str, list[ast.stmt]] = {}
    due: list[ast.AST] = []
    for tree in source.trees.values():
        for line in tree.body:
            if isinstance(line, (*FUNCTIONS, ast.ClassDef)):
                defined.setdefault(line.name, []).append(line)
                due += line.decorator_list
            else:
                due.append(line)
    live: set[int] = set()
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
            found += [home / f"{a.name.replace('.', '/')}.py" for home in homes for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            for home in homes if not node.level else [path.parents[min(node.level, len(path.parents)) - 1]]:
                base = home / (node.module or "").replace(".", "/")
                found += [
                    base.with_suffix(".py") if node.module else base / "__init__.py",
                    *(base / f"{a.name}.py" for a in node.names),
                ]
    return [p for p in found if "site-packages" not in p.parts]


def tail(node: ast.AST | None) -> str:
    """Return the last part of a name: `b` of `a.b`; empty for anything else."""
    return getattr(node, "attr", "") if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def parameters(function: Function, bound: bool) -> list[str]:
    """Return the names of the positional parameters. `bound`: without the first one, which is the object."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if bound else names


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or a module, without those of functions and classes in it."""
    due = list(ast.iter_child_nodes(function))
    while due:
        node = due.pop()
        yield node
        if not isinstance(node, SCOPES):
            due += ast.iter_child_nodes(node)


def words(name: str) -> list[str]:
    """Return the words of a name in small letters: `val_loader`, `valLoader`, `VAL_LOADER`."""
    return [w for w in re.split(r"[_\W]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if w]


REVERSED = (("in", "out"), ("input", "output"), ("inputs", "outputs"), ("src", "tgt"), ("source", "target"), ("height", "width"),
            ("rows", "cols"), ("real", "fake"), ("prev", "next"), ("start", "end"), ("low", "high"), ("first", "second"), ("left", "right"),
            ("from", "to"), ("encoder", "decoder"), ("up", "down"), ("image", "text"), ("query", "key"), ("old", "new"),
            ("one", "two"), ("one", "other"), ("this", "that"), ("positive", "negative"), ("pos", "neg"), ("min", "max"), ("index", "columns"),
            ("row", "col"))  # fmt: skip
"""Words whose exchange often means the way back (a decoder's sizes, a translation into the other language)."""


def alike(first: str, second: str) -> bool:
    """Return whether two names name two of one kind, whose order may be meant: `x1` and `x2`, `img_a` and `img_b`, `in_dim` and `out_dim`."""
    if min(len(first), len(second)) < 2:
        return True
    one, two = ([re.sub(r"\d+$", "", w) for w in words(n)] for n in (first, second))
    pairs = [(a, b) for a, b in zip(one, two, strict=False) if a != b]
    return len(one) == len(two) and all(
        (a, b) in REVERSED or (b, a) in REVERSED or max(len(a), len(b)) < 2 for a, b in pairs
    )


COMMUTES = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)
EVEN = ("abs", "square", "norm", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
PAIRED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity", "minimum", "maximum", "isclose", "eq", "ne", "logical_and",
          "logical_or", "accuracy_score", "mean_squared_error", "mean_absolute_error", "dot", "cdist")  # fmt: skip


class Normal(ast.NodeTransformer):
    """Rewrites an expression so that exchanged operands of commuting operations give the same text, after the values of local names."""

    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.values.get(node.id, node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node = ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))
        even = isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value in (2, 2.0)
        if even and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Sub):
            return ast.BinOp(ordered(node.left), node.op, node.right)
        return ordered(node) if isinstance(node.op, COMMUTES) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            pair = sorted([node.left, node.comparators[0]], key=ast.dump)
            return ast.Compare(pair[0], node.ops, pair[1:])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node = self.generic_visit(node)  # type: ignore[assignment]
        name = tail(node.func)
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None  # (a - b).abs(), a.eq(b)
        args = list(node.args)
        if name in PAIRED and len(args) >= 2:
            args[:2] = sorted(args[:2], key=ast.dump)
        elif name in PAIRED and len(args) == 1 and isinstance(node.func, ast.Attribute):
            inner, args[0] = sorted([node.func.value, args[0]], key=ast.dump)
        even = name in EVEN or (name == "pow" and args and isinstance(args[-1], ast.Constant) and args[-1].value == 2)
        if even and isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub):
            inner = ordered(inner)
        elif even and args and isinstance(args[0], ast.BinOp) and isinstance(args[0].op, ast.Sub):
            args[0] = ordered(args[0])
        func = ast.Attribute(inner, name, ast.Load()) if inner is not None else node.func
        return ast.Call(func, args, node.keywords)


def ordered(node: ast.BinOp) -> ast.BinOp:
    """Put the operands in the order of their text."""
    left, right = sorted([node.left, node.right], key=ast.dump)
    return ast.BinOp(left, node.op, right)


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of a statement with one target; `x, y = a(), b()` has two."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def symmetric(function: Function, first: str, second: str) -> bool:
    """Return whether a function of straight lines gives the same for exchanged parameters, as an accuracy or an overlap does."""
    found = []
    for one, other in ((first, second), (second, first)):
        values: dict[str, ast.expr] = {first: ast.Name(one, ast.Load()), second: ast.Name(other, ast.Load())}
        for line in function.body:
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                continue
            again = ast.parse(ast.unparse(line)).body[0] if not isinstance(line, ast.Return) else line
            if pairs := assigned(again):
                if not all(isinstance(t, ast.Name) for t, _ in pairs):
                    return False
                values |= {t.id: Normal(values).visit(v) for t, v in pairs}  # type: ignore[attr-defined]
            elif isinstance(line, ast.Return) and line.value is not None:
                found.append(ast.dump(Normal(values).visit(ast.parse(ast.unparse(line.value), mode="eval").body)))
                break
            else:
                return False
    return len(found) == 2 and found[0] == found[1]
