"""Finds parts that were joined one behind the other, and taken apart again as if they alternated."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, inside, tail

JOINS = ("cat", "concat", "concatenate", "vstack")
RESHAPES = ("view", "reshape")


def interleaved(source: Source) -> Fault | None:
    """Find `x = torch.cat([a, b])`, then `model(x).view(n, 2, -1)`: the two parts of a row are neighbours in `x`, not `a[i]` and `b[i]`."""
    for file, scope in source.nodes:
        if not isinstance(scope, (*FUNCTIONS, ast.Module)):
            continue
        nodes = [n for n in inside(scope) if isinstance(n, (ast.Assign, ast.Call))]
        nodes.sort(key=lambda n: (n.lineno, n.col_offset))
        parts: dict[str, int] = {}  # name -> number of the parts it is made of
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                if count := joined(node.value) or passed(node.value, parts):
                    parts[node.targets[0].id] = count
                    continue
                if (found := taken(node.value, parts)) is None:
                    parts.pop(node.targets[0].id, None)
                    continue
            elif (found := taken(node, parts)) is None:
                continue
            base, count = found
            return (
                f"line {node.lineno} of {file} reads `{base}` as rows of {count}, and it holds {count} parts one behind the other",
                f"each row joins parts of different samples: .view({count}, -1, ...).transpose(0, 1), or torch.stack of its parts on axis 1",
            )
    return None


def joined(value: ast.AST) -> int:
    """Return how many parts `torch.cat([a, b])` joins on the first axis; 0 for anything else. Slices or rows of one tensor are no parts."""
    if not isinstance(value, ast.Call) or tail(value.func) not in JOINS or not value.args:
        return 0
    given, axis = value.args[0], [*value.args[1:2], *(k.value for k in value.keywords if k.arg in ("dim", "axis"))]
    if not isinstance(given, (ast.List, ast.Tuple)) or any(isinstance(e, ast.Starred) for e in given.elts):
        return 0
    on_first = not axis or (isinstance(axis[0], ast.Constant) and axis[0].value == 0)
    plain = all(isinstance(e, (ast.Name, ast.Attribute, ast.Subscript)) for e in given.elts)
    return len(given.elts) if on_first and plain and len(given.elts) > 1 else 0


def passed(value: ast.AST, parts: dict[str, int]) -> int:
    """Return how many parts the result of `f(x)` holds, if `x` alone is given to a model or moved."""
    if not isinstance(value, ast.Call) or tail(value.func) in RESHAPES:
        return 0
    names = [parts.get(tail(a), 0) for a in value.args]
    if isinstance(value.func, ast.Attribute) and tail(value.func) in ("to", "cuda", "float", "contiguous", "detach"):
        return parts.get(tail(value.func.value), 0)
    return (
        names[0] if len(names) == 1 and isinstance(value.func, (ast.Name, ast.Attribute)) and model(value.func) else 0
    )


def model(called: ast.expr) -> bool:
    """Return whether a call may be that of a model, a layer or a function of the script: no reduction, no selection."""
    owner = tail(called.value) if isinstance(called, ast.Attribute) else ""
    return owner not in ("torch", "np", "numpy", "F") and not tail(called).startswith(("sum", "mean", "split", "chunk"))


def taken(value: ast.AST, parts: dict[str, int]) -> tuple[str, int] | None:
    """Return (name, parts) of `x.view(n, parts, ...)`."""
    if not isinstance(value, ast.Call) or tail(value.func) not in RESHAPES or not isinstance(value.func, ast.Attribute):
        return None
    base, sizes = value.func.value, list(value.args)
    if len(sizes) == 1 and isinstance(sizes[0], (ast.Tuple, ast.List)):
        sizes = list(sizes[0].elts)
    count = parts.get(tail(base), 0)
    if not count or len(sizes) < 3 or isinstance(sizes[0], ast.Constant):
        return None
    return (tail(base), count) if isinstance(sizes[1], ast.Constant) and sizes[1].value == count else None
