"""Finds a scaler that is fitted on the training split and again on the evaluation's, so that the model gets numbers of another scale there.

Encoders are left out: those of the same categories are the same.
"""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, assigned, inside, tail
from trainworthy.guard.measures.splits import Scope, loaded, scopes, split_of, stored

FITS = ("fit", "fit_transform")
FITTED = ("Scaler", "PCA", "Vectorizer", "SVD", "PowerTransformer", "QuantileTransformer")
"""Ends of the names of classes whose numbers depend on the rows they are fitted on."""


def again(source: Source) -> Fault | None:
    """Find the line that fits one object on the evaluation's rows, after another line that fitted it on those of training."""
    for file, scope in scopes(source):
        first: dict[str, int] = {}
        for node, made, fits in sorted(statements(scope), key=lambda row: row[0].lineno):
            named = {split_of(name) for name in (*stored(node), *loaded(node))} - {""}
            for name in fits:
                if "train" in named:
                    first.setdefault(name, node.lineno)
                elif named and name in first:
                    return (
                        f"line {node.lineno} of {file} fits `{name}` again, on the {min(named)} split; line {first[name]} fitted it on training's",
                        f"{name}.transform(...) is meant: the model gets inputs of another scale than in training",
                    )
            first = {name: line for name, line in first.items() if name not in made}
    return None


def statements(scope: Scope) -> Iterator[tuple[ast.stmt, set[str], set[str]]]:
    """Yield the statements of a scope that assign or fit: with the names that they assign, and the scalers that they fit."""
    lines = [n for n in inside(scope) if isinstance(n, (ast.Assign, ast.AnnAssign, ast.Expr))]
    scalers = {name for node in lines for name in built(node)}
    for node in lines:
        calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        fits = {tail(f.value) for f in calls if f.attr in FITS and isinstance(f.value, ast.Name)} & scalers
        yield node, set(stored(node)), fits


def built(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement gives to new scalers: `x = StandardScaler()`, `x, y = MinMaxScaler(), MinMaxScaler()`."""
    for name, call in assigned(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "fit":
            call = call.func.value  # StandardScaler().fit(rows)
        if isinstance(name, ast.Name) and isinstance(call, ast.Call) and tail(call.func).endswith(FITTED):
            yield name.id


def in_function(source: Source) -> Fault | None:
    """Find a function that fits the script's one scaler on whatever it gets, and gets rows of training and of the evaluation."""
    nodes = [n for _, n in source.nodes]
    scalers = {name for n in nodes if isinstance(n, ast.stmt) for name in built(n)}
    for file, function in source.nodes:
        if not isinstance(function, FUNCTIONS):
            continue
        own = {a.arg for a in function.args.args}
        lines = [n for n in ast.walk(function) if isinstance(n, ast.stmt)]
        calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        fits = [c for c in calls if c.func.attr in FITS and c.args and loaded(c.args[0]) & own]  # type: ignore[attr-defined]
        for call in fits:
            name = tail(call.func.value)  # type: ignore[attr-defined]
            kept = {tail(c.func.value) for c in calls if c.func.attr == "transform"}  # type: ignore[attr-defined]
            chosen = any(isinstance(n, (ast.If, ast.IfExp)) for n in ast.walk(function))
            if name not in scalers or name in kept or chosen or any(name in stored(n) for n in lines):
                continue
            given = [
                n for n in nodes if isinstance(n, ast.Call) and getattr(n.func, "id", "") == function.name and n.args
            ]
            of = {split_of(word): n.lineno for n in given for word in loaded(n.args[0])}
            others = sorted(set(of) & {"val", "test", "eval"})
            if "train" in of and others:
                return (
                    f"line {call.lineno} of {file} fits `{name}` on whatever {function.name}() gets: in line {of['train']} the rows of training, "
                    f"in line {of[others[0]]} those of the {others[0]} split",
                    f"{name}.transform(...) is meant, fitted once on training: each split is scaled by its own statistics",
                )
    return None
