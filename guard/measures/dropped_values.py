"""Finds values that a statement computes and drops: the result of a function that changes nothing, a parameter that is bound anew."""

import ast
from collections.abc import Iterable

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Function, Source, inside, tail
from trainworthy.guard.measures.splits import loaded

SAME = {"abs", "cat", "clamp", "concat", "concatenate", "cos", "dot", "einsum", "exp", "expand", "float", "int", "len", "log", "log2", "matmul",
        "max", "maximum", "mean", "min", "minimum", "norm", "permute", "pow", "reshape", "round", "sin", "softmax", "sqrt", "square", "squeeze",
        "stack", "sum", "tanh", "transpose", "unsqueeze", "view", "where", "zip"}  # fmt: skip
"""Functions and methods that change nothing."""
TABLES = {"drop_duplicates", "dropna", "fillna", "reset_index", "set_index", "sort_values", "sort_index"}
"""Methods of pandas that return a changed copy."""
TENSORS = {
    "clamp",
    "index_add",
    "index_fill",
    "masked_fill",
    "masked_scatter",
    "mul",
    "permute",
    "scatter_add",
    "softmax",
    "unsqueeze",
}
"""Methods of tensors that return a new one; with `_` at the end they change it."""
HOLDERS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")
MOVES = ("to", "cuda", "float", "half")


def unused(source: Source, calls: Iterable[tuple[str, ast.Call, Function]]) -> Fault | None:
    """Find a statement that calls a function or method for its result alone. `calls`: those that reach a function of the script."""
    # A call in try or with may be there to see whether it raises
    tried = {id(n) for _, t in source.nodes if isinstance(t, (ast.Try, ast.With)) for n in ast.walk(t)}
    lines = {id(n.value): n for _, n in source.nodes if isinstance(n, ast.Expr) and id(n) not in tried}
    given = {n.arg for _, n in source.nodes if isinstance(n, ast.arg)}
    for file, call, function in calls:
        if id(call) in lines and getattr(call.func, "id", "") not in given and changes_nothing(function):
            return (
                f"line {call.lineno} of {file} calls {ast.unparse(call.func)}() and drops what it returns; {function.name}() in line "
                f"{function.lineno} changes nothing else",
                "the result must be assigned: as it is, the line has no effect",
            )
    pandas = any(isinstance(n, (ast.Import, ast.ImportFrom)) and "pandas" in ast.unparse(n) for _, n in source.nodes)
    own = {n.name for _, n in source.nodes if isinstance(n, FUNCTIONS)}  # `net.clamp(-1, 1)` may change its weights
    for file, node in source.nodes:
        if not isinstance(node, ast.Call) or id(node) not in lines or not isinstance(node.func, ast.Attribute):
            continue
        name, keys = node.func.attr, {k.arg for k in node.keywords}
        if name in own:
            continue
        table = pandas and name in TABLES and "inplace" not in keys
        if table or (name in TENSORS and "out" not in keys and (node.args or node.keywords)):
            return (
                f"line {node.lineno} of {file} calls {ast.unparse(node.func)}() and drops what it returns",
                f"`{name}` returns a changed copy: assign it, or use {'inplace=True' if table else name + '_'}",
            )
    return None


def changes_nothing(function: Function) -> bool:
    """Return whether a function only computes what it returns, from its arguments, without a call that could do anything else."""
    returns = 0
    for node in inside(function):
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            returns += 1
        elif isinstance(node, ast.Call):
            if tail(node.func) not in SAME or any(k.arg == "out" for k in node.keywords):
                return False
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if not all(isinstance(t, ast.Name) for t in getattr(node, "targets", None) or [node.target]):  # type: ignore[union-attr]
                return False
        elif isinstance(node, EFFECTS):
            return False
    return returns > 0 and not function.decorator_list and isinstance(function, ast.FunctionDef)


EFFECTS = (ast.AugAssign, ast.Raise, ast.Assert, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete, ast.With, ast.For,
           ast.While, ast.Try, ast.Pass, ast.NamedExpr, ast.Import, ast.ImportFrom, *FUNCTIONS)  # fmt: skip


def rebound(source: Source) -> Fault | None:
    """Find a loop over parameters or tensors that binds its own variable to a new value and never reads it."""
    for file, loop in source.nodes:
        if not isinstance(loop, ast.For):
            continue
        own = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        held = any(isinstance(n, ast.Call) and tail(n.func) in HOLDERS for n in ast.walk(loop.iter))
        for at, line in enumerate(loop.body):
            target = line.targets[0] if isinstance(line, ast.Assign) and len(line.targets) == 1 else None
            name = getattr(target, "id", "")
            if name not in own or any(name in loaded(s) for s in loop.body[at + 1 :]):
                continue
            value = line.value  # type: ignore[attr-defined]
            moved = (
                isinstance(value, ast.Call)
                and tail(value.func) in MOVES
                and tail(getattr(value.func, "value", None)) == name
            )
            if (held or moved) and not read_after(source, loop, name):
                return (
                    f"line {line.lineno} of {file} sets the loop's `{name}` to a new value, and nothing reads it",
                    f"the assignment binds the name anew and leaves {'the parameter' if held else 'the tensor'} as it is: change it in place "
                    f"(`{name}.data.copy_(...)`), or store the new one",
                )
    return None


def read_after(source: Source, loop: ast.For, name: str) -> bool:
    """Return whether a name is read behind a loop, in any function: what holds it may be a closure."""
    within = {id(n) for n in ast.walk(loop)}
    last = loop.end_lineno or loop.lineno
    return any(
        isinstance(n, ast.Name)
        and n.id == name
        and isinstance(n.ctx, ast.Load)
        and id(n) not in within
        and n.lineno > last
        and not rebinds(source, loop, name, n.lineno)
        for _, n in source.nodes
    )


def rebinds(source: Source, loop: ast.For, name: str, line: int) -> bool:
    """Return whether a name is bound again between a loop and a line."""
    last = loop.end_lineno or loop.lineno
    return any(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) and last < n.lineno <= line
        for _, n in source.nodes
    )
