"""Finds advantages that mask the next value by the end of another step.

Some loops store, for each step, whether the observation before it began an episode (`dones[t] = next_done`, then `env.step()`): the next value
is then masked by `dones[t + 1]`. Others store what the step returned: it is masked by `dones[t]`.
"""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, tail, words

ENDS = {"done", "dones", "terminal", "terminals", "terminated", "terminations", "ends"}


def shifted(source: Source) -> Fault | None:
    """Find `dones[t]` next to `values[t + 1]` where `dones[t]` was stored before the step, and `dones[t + 1]` where it was stored after it."""
    for file, scope in source.nodes:
        if not isinstance(scope, (*FUNCTIONS, ast.Module)):
            continue
        stored = dict(rollouts(scope))
        for block in blocks(scope) if stored else ():
            read = [(tail(n.value), ast.unparse(n.slice), n.lineno) for s in block for n in ast.walk(s)
                    if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)]  # fmt: skip
            ahead = {at.removesuffix(" + 1") for name, at, _ in read if at.endswith(" + 1") and name not in stored}
            for name, at, line in read:
                step = at.removesuffix(" + 1")
                if name not in stored or step not in ahead or {a for n, a, _ in read if n == name} != {at}:
                    continue
                if stored[name] == (at == step):
                    right = f"{name}[{step} + 1]" if at == step else f"{name}[{step}]"
                    return (
                        f"line {line} of {file} masks the value of step {step} + 1 by `{name}[{at}]`, which is "
                        + (
                            f"whether step {step} began an episode"
                            if at == step
                            else f"whether step {step} + 1 ended one"
                        ),
                        f"`{right}` is meant: `{name}` is stored {'before' if stored[name] else 'after'} env.step() for each step",
                    )
    return None


def rollouts(scope: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield (array, whether it holds what was known before the step) of the ends that a loop around `env.step()` stores."""
    for loop in (n for n in ast.walk(scope) if isinstance(n, ast.For)):
        places = [k for k, s in enumerate(loop.body) if steps(s)]
        if len(places) != 1:
            continue
        for k, s in enumerate(loop.body):
            target = s.targets[0] if isinstance(s, ast.Assign) and len(s.targets) == 1 else None
            if not isinstance(target, ast.Subscript) or not set(words(tail(target.value))) & ENDS or k == places[0]:
                continue
            value = {n.id for n in ast.walk(s.value) if isinstance(n, ast.Name)}  # type: ignore[attr-defined]
            later = {
                n.id
                for one in loop.body[places[0] :]
                for n in ast.walk(one)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            if value & later and any(set(words(v)) & ENDS for v in value & later):
                yield tail(target.value), k < places[0]


def steps(statement: ast.stmt) -> bool:
    """Return whether a statement steps an environment."""
    calls = [
        n
        for n in ast.walk(statement)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "step"
    ]
    return any("env" in tail(n.func.value).lower() for n in calls)  # type: ignore[attr-defined]


def blocks(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements without loops or conditions in them."""
    for node in ast.walk(scope):
        for block in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(block, list):
                yield [s for s in block if isinstance(s, (ast.Assign, ast.AugAssign, ast.Expr))]
