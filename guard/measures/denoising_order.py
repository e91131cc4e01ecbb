"""Finds a sampling loop of a diffusion model that begins with noise at the first step, which training reaches last."""

import ast
import re

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, tail
from trainworthy.guard.measures.splits import loaded, stored

NOISE = ("randn", "randn_like", "normal")
CHAIN = re.compile(r"(?i)alphas?_?(cum_?prod|bars?|hats?)|posterior_(mean|variance)\w*|sqrt_one_minus\w*")
"""Names of a chain of noise levels. A flow goes from 0 to 1 and has none."""
PROGRESS = ("tqdm", "trange", "progress_bar", "track")


def forwards(source: Source) -> Fault | None:
    """Find `x = randn(...)`, then `for t in range(T): x = denoise(x, t)`."""
    if not any(CHAIN.fullmatch(tail(n)) for _, n in source.nodes):
        return None
    for file, function in source.nodes:
        if not isinstance(function, FUNCTIONS):
            continue
        drawn = {name for n in ast.walk(function) if isinstance(n, ast.Assign) and noise(n.value) for name in stored(n)}
        for loop in ast.walk(function) if drawn else ():
            if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not rises(loop.iter):
                continue
            for line in loop.body:
                for name in stored(line).keys() & drawn if isinstance(line, ast.Assign) else ():
                    if denoises(line.value, name, times(loop)):  # type: ignore[attr-defined]
                        return (
                            f"line {loop.lineno} of {file} runs `{loop.target.id}` from the first step to the last, and line {line.lineno} denoises "
                            f"`{name}`, which begins as noise alone, by it",
                            "noise alone belongs to the last step of the chain: the loop must go backwards, reversed(range(T))",
                        )
    return None


def noise(value: ast.AST) -> bool:
    """Return whether a value is drawn noise as it is."""
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("to", "cuda", "float")
    ):
        value = value.func.value
    return isinstance(value, ast.Call) and tail(value.func) in NOISE


def rises(order: ast.AST) -> bool:
    """Return whether a loop runs over range(T), also with a bar that shows its progress."""
    while isinstance(order, ast.Call) and tail(order.func) in PROGRESS and order.args and tail(order.func) != "trange":
        order = order.args[0]
    return isinstance(order, ast.Call) and tail(order.func) in ("range", "trange") and len(order.args) == 1


def times(loop: ast.For) -> set[str]:
    """Return the loop's variable, and names that are filled with it: `torch.full((n,), t)`, `torch.ones(n) * t`."""
    name = loop.target.id  # type: ignore[attr-defined]
    found = {name}
    for line in loop.body:
        if isinstance(line, ast.Assign) and name in loaded(line.value):
            inverse = any(isinstance(n, (ast.Sub, ast.USub, ast.Subscript, ast.Div)) for n in ast.walk(line.value))
            found = found - {name} if inverse else found | stored(line).keys()
    return found


def denoises(value: ast.AST, name: str, given: set[str]) -> bool:
    """Return whether a call gets the noised sample and the step as they are."""
    if (
        not isinstance(value, ast.Call)
        or "add_noise" in tail(value.func)
        or tail(value.func).startswith(("q_", "forward"))
    ):
        return False
    read = {getattr(a, "id", "") for a in (*value.args, *(k.value for k in value.keywords))}
    return name in read and bool(read & given)
