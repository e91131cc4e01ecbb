"""Finds a metric that is computed in every epoch, and never reset: it is a mean over all epochs so far."""

import ast

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, inside, tail

RESULTS = ("compute", "aggregate")
LIBRARIES = ("torchmetrics", "monai")


def metric(source: Source) -> Fault | None:
    """Find `metric = Metric()` before a loop over epochs, with `metric.compute()` or `metric.aggregate()` in it, and no `reset()` anywhere."""
    nodes = source.nodes
    if any(isinstance(n, ast.Attribute) and "reset" in n.attr and not environment(n) for _, n in nodes):
        return None
    kinds = {c.name for _, c in nodes if isinstance(c, ast.ClassDef) and resettable(c)}
    kinds |= {a.asname or a.name for _, n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] in LIBRARIES
              for a in n.names}  # fmt: skip
    for file, scope in nodes:
        if not isinstance(scope, (*FUNCTIONS, ast.Module)):
            continue
        own = list(inside(scope))
        made = {n.targets[0].id: n.lineno for n in own if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
                and isinstance(n.value, ast.Call) and tail(n.value.func) in kinds}  # fmt: skip
        for loop in (n for n in own if isinstance(n, ast.For)) if made else ():
            if not any(isinstance(n, (ast.For, ast.While)) for n in ast.walk(loop) if n is not loop):
                continue  # it is computed over the batches of one pass
            again = {
                n.targets[0].id
                for n in ast.walk(loop)
                if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
            }
            for call in (n for n in ast.walk(loop) if isinstance(n, ast.Call) and tail(n.func) in RESULTS):
                name = tail(call.func.value) if isinstance(call.func, ast.Attribute) else ""
                if name in made and name not in again and made[name] < loop.lineno and not within_pass(loop, call):
                    return (
                        f"line {call.lineno} of {file} computes `{name}` in each turn of the loop of line {loop.lineno}, and nothing resets it",
                        f"it is a mean over all epochs so far: {name}.reset() after it",
                    )
    return None


def environment(node: ast.Attribute) -> bool:
    """Return whether `env.reset` is that of an environment."""
    return "env" in tail(node.value).lower()


def resettable(kind: ast.ClassDef) -> bool:
    """Return whether a class of the script has a `reset()` and a result."""
    names = {f.name for f in kind.body if isinstance(f, FUNCTIONS)}
    return "reset" in names and bool(names & set(RESULTS))


def within_pass(loop: ast.For, call: ast.Call) -> bool:
    """Return whether a call is made in a loop within the loop: once for each batch."""
    inner = [n for n in ast.walk(loop) if isinstance(n, (ast.For, ast.While)) and n is not loop]
    return any(call is n for one in inner for n in ast.walk(one))
