"""What the rules ask of a syntax tree: names, numbers, calls, assignments, and the nodes of a scope or a loop."""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
LOOPS = (ast.For, ast.While)

# --- names and numbers


def tail(node: ast.AST | None) -> str:
    """Return the last part of a name: `b` of `a.b`; empty for anything else."""
    return getattr(node, "attr", "") if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def variable(node: ast.AST | None) -> str:
    """Return the name of a variable; empty for anything else, `a.b` too."""
    return getattr(node, "id", "")


def words(name: str) -> list[str]:
    """Return the words of a name in small letters: `val_loader`, `valLoader`, `VAL_LOADER`."""
    return [w for w in re.split(r"[_\W]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()) if w]


def variables(node: ast.AST) -> set[str]:
    """Return the variables that occur in a node, read or assigned."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def loaded(node: ast.AST) -> set[str]:
    """Return the variables that a node reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def number(node: ast.AST) -> Any:
    """Return the number that is written; None for anything else, True and False too."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) in (int, float) else None


# --- scopes, blocks and loops


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


def trains(node: ast.AST) -> bool:
    """Return whether `backward()` is called in a node."""
    return any(methods(ast.walk(node), "backward"))


# --- assignments


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what a node assigns to: `a` and `b` of `a = b = 0`, the variable of a loop."""
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [t for t in found if t is not None]


def stored(node: ast.AST) -> dict[str, int]:
    """Return the variables that a statement assigns, with their lines."""
    names = [n for t in targets(node) for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return {n.id: n.lineno for n in names}


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) of a statement with one target; `x, y = a(), b()` has two."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(names) == len(values):
            return list(zip(names, values, strict=True))
        case ast.Assign(targets=[target], value=value):
            return [(target, value)]
    return []


def paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return (target, value) for each of the targets that have a value of their own, as far as both go."""
    match target, value:
        case ast.Tuple(elts=names), ast.Tuple(elts=values):
            return list(zip(names, values, strict=False))
    return [(target, value)]


def parameters(function: Function, bound: bool) -> list[str]:
    """Return the names of the positional parameters. `bound`: without the first one, which is the object."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if bound else names


# --- calls


def calls(nodes: Iterable[ast.AST], *names: str) -> Iterator[Any]:
    """Yield the calls among nodes whose last name is one of these: `cat(...)` and `torch.cat(...)` for `cat`."""
    return (n for n in nodes if isinstance(n, ast.Call) and tail(n.func) in names)


def methods(nodes: Iterable[ast.AST], *names: str) -> Iterator[Any]:
    """Yield the calls among nodes that are of something's method: `x.append(...)`."""
    return (n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in names)


def is_call(node: ast.AST | None, *names: str) -> bool:
    """Return whether a node is a call whose last name is one of these."""
    return isinstance(node, ast.Call) and tail(node.func) in names


def owner(call: ast.Call) -> str:
    """Return the last name of the object whose method is called: `b` of `a.b.f()`."""
    return tail(getattr(call.func, "value", None))


def passed(call: ast.Call) -> list[ast.expr]:
    """Return what a call passes, by place and by keyword."""
    return [*call.args, *(k.value for k in call.keywords)]


def subject(call: ast.Call, *libraries: str) -> ast.expr:
    """Return what `x.relu()` works on, or `torch.relu(x)` of these libraries."""
    base = call.func.value  # type: ignore[attr-defined]
    return call.args[0] if tail(base) in libraries and call.args else base


def unwrapped(value: ast.AST, *names: str) -> ast.AST:
    """Return a value without methods of these names that end it: `x` of `x.to(device).float()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in names:
        value = value.func.value
    return value


def unrolled(sizes: list[ast.expr]) -> list[ast.expr]:
    """Return sizes that are passed one by one or as one tuple: `x.view(2, -1)`, `x.view((2, -1))`."""
    match sizes:
        case [ast.Tuple(elts=given) | ast.List(elts=given)]:
            return given
    return sizes
