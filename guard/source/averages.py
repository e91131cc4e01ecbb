"""Finds an average of the weights that is kept up to date and never used."""

import ast

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import named
from trainworthy.guard.source.calls import unwrapped
from trainworthy.guard.source.nodes import tail, variable
from trainworthy.guard.source.reading import Source

NAMES = {"ema", "averaged", "swa", "shadow"}
MADE = ("deepcopy", "AveragedModel", "EMA", "ModelEMA", "ModelEma", "ModelEmaV2", "ExponentialMovingAverage")
MOVES = {"update", "average", "moving", "accumulate", "lerp", "polyak"}
READS = {"eval", "evaluate", "test", "validate", "sample", "generate", "save", "load", "apply", "use", "swap", "copy", "predict",
         "export"}  # fmt: skip
CARE = ("requires_grad_", "to", "cuda", "eval", "train")
"""Methods that prepare a model, and give it back."""


def unread(source: Source) -> Fault | None:
    """Find `ema = copy.deepcopy(model)`, `update_ema(ema, model)`, and no other line that names `ema`."""
    for file, scope in source.scopes:
        for name, line, value in named(ast.walk(scope)):
            made = unwrapped(value, *CARE)
            if not (NAMES & set(words(name)) and isinstance(made, ast.Call) and tail(made.func) in MADE):
                continue
            parents = {id(child): node for node in ast.walk(scope) for child in ast.iter_child_nodes(node)}
            uses = [n for n in ast.walk(scope) if variable(n) == name and isinstance(n.ctx, ast.Load)]
            moved = [n for n in uses if moves(n, parents)]
            if moved and all(n in moved or cared(n, parents) for n in uses):
                return (
                    f"`{name}`, the average of the weights from line {line} of {file}, is updated in line {moved[0].lineno} and never read",
                    f"evaluation, sampling and saving use the raw weights: give them `{name}`",
                )
    return None


def moves(use: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """Return whether a use is that of an update: `update_ema(ema, model)`, `ema.update(model)`."""
    match parents.get(id(use)):
        case ast.Call(func=func) if func is not use:
            return bool(MOVES & set(words(tail(func)))) and not READS & set(words(tail(func)))
        case ast.Attribute(attr="update" | "update_parameters"):
            return True
    return False


def cared(use: ast.AST, parents: dict[int, ast.AST]) -> bool:
    """Return whether a use only prepares the average: `ema.eval()` as a statement. As an argument, `sample(ema.eval())` reads it."""
    attribute = parents.get(id(use))
    call = parents.get(id(attribute))
    prepares = isinstance(attribute, ast.Attribute) and attribute.attr in CARE and isinstance(call, ast.Call)
    return prepares and isinstance(parents.get(id(call)), ast.Expr)
