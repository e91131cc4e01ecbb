"""Finds terms that are not what their names say: a derivative by another variable, a term that counts twice, labels that are kept where
they were to be dropped."""

import ast
import re
from collections.abc import Iterator

from trainworthy.core.base.names import LESS, words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import loaded, named, stored
from trainworthy.guard.source.calls import calls, is_call
from trainworthy.guard.source.nodes import FUNCTIONS, inside, tail, variable
from trainworthy.guard.source.reading import Source

DERIVATIVES = ("grad", "gradient", "gradients", "derivative", "diff", "D")
RANDOM = {"rand", "randn", "random", "normal", "uniform", "noise", "sample", "randint", "gauss", "choice", "draw"}
DROPPED = {"drop", "dropped", "uncond"}
NOTHING = {"null", "uncond", "unconditional", "empty", "blank", "none", "nothing", "pad"}


def other_variable(source: Source) -> Fault | None:
    """Find `u_xx = grad(u_x, t)` next to `u_x = grad(u, x)` and `u_t = grad(u, t)`: letters of a name are what it was differentiated by."""
    for file, scope in source.scopes:
        found = [
            (name, line, order(name), order(of) + by)
            for name, line, value in named(inside(scope))
            for of, by in derivative(value)
            if "_" in name and order(of) + by
        ]
        wrong = [one for one in found if sorted(one[2]) != sorted(one[3])]
        if len(found) - len(wrong) < 2 or len(wrong) != 1:
            continue
        name, line, stated, made = wrong[0]
        if set(stated) <= {c for _, _, _, letters in found for c in letters} and len(stated) == len(made):
            return (
                f"line {line} of {file} makes `{name}` by differentiating by {' and '.join(made)}",
                f"by {' and '.join(stated)} is meant, as the name says; the other derivatives have the letters of their variables",
            )
    return None


def order(name: str) -> str:
    """Return the letters behind the underscore: `xx` of `u_xx`; empty for a name without."""
    return name.partition("_")[2]


def derivative(value: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield (what is differentiated, by what) of the calls in a value, where both are variables and the second a letter."""
    for call in calls(ast.walk(value), *DERIVATIVES):
        match call.args:
            case [ast.Name(id=of), ast.Name(id=by), *_] if len(by) == 1:
                yield of, by


def counted_twice(source: Source) -> Fault | None:
    """Find `loss = f(a).mean() + f(a).mean()`. Draws differ from call to call."""
    if any("dropout" in words(tail(n.func)) for _, n in source.of(ast.Call)):
        return None  # two passes with other units dropped
    inner = {id(n.left) for _, n in source.of(ast.BinOp) if isinstance(n.op, ast.Add)}
    for file, node in source.of(ast.BinOp):
        if id(node) in inner or not isinstance(node.op, ast.Add):
            continue
        seen = set()
        for term in summands(node):
            text = ast.unparse(term)
            if text in seen and reduced(term) and loaded(term):
                return (
                    f"line {node.lineno} of {file} adds `{text}` twice",
                    "one of the two should have other arguments: as it is, one term counts double and another is missing",
                )
            seen.add(text)
    return None


def summands(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the terms of a sum, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from summands(node.left)
        yield from summands(node.right)
    else:
        yield node


def reduced(term: ast.AST) -> bool:
    """Return whether a term is one number by the functions that make it, and none of them draws."""
    made = [words(tail(n.func)) for n in ast.walk(term) if isinstance(n, ast.Call)]
    return any({"mean", "sum", "norm", "criterion"} & set(m) or (m and m[-1].endswith(LESS)) for m in made) and not any(
        RANDOM & set(m) for m in made
    )


def dropped_labels(source: Source) -> Fault | None:
    """Find `drop = torch.rand(n) < p`, then `torch.where(drop, labels, null)`: the labels of the dropped samples are kept, all others are lost."""
    for file, scope in source.scopes:
        made = {name: value for name, _, value in named(inside(scope))}
        for call in calls(inside(scope), "where"):
            if len(call.args) != 3:
                continue
            condition, kept, other = call.args
            null = NOTHING & set(words(tail(other))) or is_call(other, "full_like", "full", "zeros_like", "empty_like")
            if null and tail(kept) and not NOTHING & set(words(tail(kept))) and drops(condition, made):
                return (
                    f"line {call.lineno} of {file}: `{ast.unparse(call)}` keeps what should be dropped, and drops the rest",
                    f"{ast.unparse(call.func)}({', '.join(map(ast.unparse, (condition, other, kept)))}) is meant",
                )
    return None


def drops(condition: ast.expr, made: dict[str, ast.expr]) -> bool:
    """Return whether a condition holds where a random number is below a rate, and one of the two has a name for what is dropped."""
    value = made.get(variable(condition), condition)
    match value:
        case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()], comparators=[rate]) if any(
            calls(ast.walk(left), "rand", "rand_like", "random")
        ):
            return bool(DROPPED & {*words(tail(condition)), *words(tail(rate))})
    return False


NUMBERED = re.compile(r"((?:log_?)?det|logdet|ldj|loss|kld?|nll)_?\d+")


def uncounted(source: Source) -> Fault | None:
    """Find `x, det1 = first(x)`, `x, det2 = second(x)` and `logdet = logdet + det2`: one of several numbered terms is never read."""
    for file, scope in source.plain_scopes:
        nodes = list(inside(scope))
        lines = {name: line for n in nodes for name, line in stored(n).items() if NUMBERED.fullmatch(name)}
        read = {name for n in nodes for name in loaded(n)} if len(lines) > 1 else set()
        for name, line in lines.items() if isinstance(scope, FUNCTIONS) else ():
            kin = [other for other in lines if other != name and other in read and stem(other) == stem(name)]
            if kin and name not in read:
                return (
                    f"line {line} of {file} computes `{name}`, and {scope.name}() never reads it, though it reads `{kin[0]}`",
                    "one of the terms is left out of the sum",
                )
    return None


def stem(name: str) -> str:
    """Return a name without its number."""
    return name.rstrip("0123456789_")
