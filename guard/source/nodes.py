"""What the rules read in a syntax tree: names and numbers, and the nodes of a scope or a loop."""

import ast
import math
from collections.abc import Iterable, Iterator
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
LOOPS = (ast.For, ast.While)
INPUTS = {"x", "data", "features", "feats", "images", "imgs", "inputs", "samples", "sentences", "texts", "xs"}
LABELS = {"y", "labels", "targets", "classes", "ys"}
"""Words of the names of inputs, and of what belongs to each of them."""


def tail(node: ast.AST | None) -> str:
    """Return the last part of a name: `b` of `a.b`; empty for anything else."""
    return getattr(node, "attr", "") if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def variable(node: ast.AST | None) -> str:
    """Return the name of a variable; empty for anything else, `a.b` too."""
    return getattr(node, "id", "")


def number(node: ast.AST) -> Any:
    """Return the number that is written; None for anything else, True and False too."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None


def written(node: ast.AST) -> float | None:
    """Return the number that is written, also below 0 or infinite: 0, -1e9, float("inf"), -math.inf, np.inf; None for anything else."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = written(operand)
            return None if inner is None else -inner
        case ast.Attribute(attr=name) if name.lower() in ("inf", "infinity"):
            return math.inf
        case ast.Call(func=func, args=[ast.Constant(value=value)]) if tail(func) == "float":
            try:
                return float(value)
            except (TypeError, ValueError):
                return None
    value = number(node)
    return None if value is None else float(value)


def only(nodes: Iterable[ast.AST], kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the nodes of these kinds."""
    return [n for n in nodes if isinstance(n, kinds)]


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or a module, without those of functions and classes in it."""
    due = list(ast.iter_child_nodes(function))
    while due:
        node = due.pop()
        yield node
        if not isinstance(node, SCOPES):
            due += ast.iter_child_nodes(node)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a statement: what it holds, and what its `else` holds."""
    for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
        if isinstance(block, list):
            yield block


def nested(loop: ast.AST) -> set[int]:
    """Return the ids of the nodes of loops within a loop."""
    loops = [n for n in ast.walk(loop) if isinstance(n, LOOPS) and n is not loop]
    return {id(n) for one in loops for n in ast.walk(one)}


def parameters(function: Function, bound: bool) -> list[str]:
    """Return the names of the positional parameters. `bound`: without the first one, which is the object."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if bound else names
