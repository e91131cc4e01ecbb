"""Finds two values that have each other's name: arguments of a call, results of a function, the parts of a batch."""

import ast
from collections import Counter

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.calls import is_call
from trainworthy.guard.source.nodes import INPUTS, LABELS, Function, inside, only, tail, variable
from trainworthy.guard.source.reading import Source
from trainworthy.guard.source.symmetric import alike, symmetric

LOADERS = {"loader", "dataloader", "dl", "train", "batches"}
MEAN, SPREAD = {"mean", "means", "mu", "loc", "avg"}, {"std", "stds", "sd", "sigma", "stdev", "scale"}
TRUE = {"true", "target", "targets", "label", "labels", "truth", "gold", "gt", "actual"}
PREDICTED = {"pred", "preds", "prediction", "predictions", "predicted", "output", "outputs", "logits", "score", "scores",
             "prob", "probs", "hat"}  # fmt: skip
MOMENTS = (("mean", "standard deviation"), (MEAN, SPREAD))
ANSWERS = (("true values", "predictions"), (TRUE, PREDICTED))
SCORES = ("precision_score", "recall_score", "r2_score", "roc_auc_score", "average_precision_score", "log_loss", "fbeta_score",
          "precision_recall_fscore_support", "classification_report", "confusion_matrix", "roc_curve", "precision_recall_curve",
          "brier_score_loss")  # fmt: skip
KNOWN = {"Normalize": MOMENTS, "Normal": MOMENTS, **dict.fromkeys(SCORES, ANSWERS)}
"""Functions of torchvision, torch and scikit-learn: what the first two arguments are, words of their names. Functions that are symmetric
(accuracy, mean squared error) are left out."""


def arguments(source: Source) -> Fault | None:
    """Find two arguments that have each other's name."""
    rows = [(*row, [tail(a) for a in plain(row[1])][: len(row[3])]) for row in source.calls.reached]
    for file, call, function, names, given in rows:
        for i, j in exchanged(given, names):
            straight = any(f is function and g[i : j + 1 : j - i] == [given[j], given[i]] for _, _, f, _, g in rows)
            if alike(given[i], given[j]) or straight or symmetric(function, names[i], names[j]):
                continue
            what = source.calls.owner.get(id(function), function).name
            return (
                f"line {call.lineno} of {file}: {ast.unparse(call.func)}() gets ({names_or_dots(given)}), and {what} in line "
                f"{function.lineno} takes ({', '.join(names[: len(given)])})",
                f"`{given[i]}` and `{given[j]}` are exchanged: pass them in the order of the parameters, or by keyword",
            )
    return None


def keywords(source: Source) -> Fault | None:
    """Find two keywords that get each other's name."""
    calls = [(file, n) for file, n in source.of(ast.Call) if len(n.keywords) > 1]
    for file, call in calls:
        keys, values = [k.arg or "" for k in call.keywords], [tail(k.value) for k in call.keywords]
        for i, j in exchanged(values, keys):
            straight = any(
                tail(c.func) == tail(call.func)
                and {(keys[i], keys[i]), (keys[j], keys[j])} <= {(k.arg or "", tail(k.value)) for k in c.keywords}
                for _, c in calls
            )
            if not alike(keys[i], keys[j]) and not straight:
                return (
                    f"line {call.lineno} of {file}: {ast.unparse(call.func)}() gets {keys[i]}={ast.unparse(call.keywords[i].value)} and "
                    f"{keys[j]}={ast.unparse(call.keywords[j].value)}",
                    f"`{keys[i]}` and `{keys[j]}` are exchanged",
                )
    return None


def library(source: Source) -> Fault | None:
    """Find arguments of a library's function in the wrong order, by the words of their names."""
    scores = {a.asname or a.name for _, n in source.of(ast.Import, ast.ImportFrom) if of_scikit(n) for a in n.names}
    for file, call in source.of(ast.Call):
        called = tail(call.func)
        if called not in KNOWN or called in source.calls.by_name or called in source.calls.classes:
            continue
        base = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if called in SCORES and ast.unparse(base) not in scores | {"sklearn.metrics"}:
            continue  # that of another library, with another order
        (first, second), (one, two) = KNOWN[called]
        match plain(call):
            case [here, there, *_] if means(here, two, one) and means(there, one, two):
                return (
                    f"line {call.lineno} of {file}: {called}() gets `{ast.unparse(here)}` for its {first} and "
                    f"`{ast.unparse(there)}` for its {second}",
                    f"the two are exchanged: {called}() takes {first} before {second}",
                )
    return None


def unpacked(source: Source) -> Fault | None:
    """Find two results that are unpacked into each other's name."""
    found: list[tuple[str, ast.Assign, Function, list[str], list[str]]] = []
    reached = {id(call): function for _, call, function, _ in source.calls.reached}
    for file, node in source.of(ast.Assign):
        match node.targets[0]:
            case ast.Tuple(elts=parts) if (function := reached.get(id(node.value))) is not None:
                names, results = [tail(t) for t in parts], returned(function)
                if len(names) == len(results):
                    found.append((file, node, function, names, results))
    for file, node, function, names, results in found:
        given = {tail(a) for a in node.value.args}
        for i, j in exchanged(names, results):
            straight = any(f is function and (n[i], n[j]) == (r[i], r[j]) for _, _, f, n, r in found)
            meant = alike(names[i], names[j]) and {names[i], names[j]} != {"x", "y"}
            if not (meant or straight or {names[i], names[j]} <= given):
                return (
                    f"line {node.lineno} of {file} unpacks ({names_or_dots(names)}), and {function.name}() in line "
                    f"{function.lineno} returns ({', '.join(results)})",
                    f"`{names[i]}` and `{names[j]}` are exchanged: each holds the other's values",
                )
    return None


def samples(source: Source) -> Fault | None:
    """Find a loop over batches whose names are exchanged, by those that the one data set of the script returns."""
    sets = [f for f in source.calls.functions if f.name == "__getitem__" and id(f) in source.calls.owner]
    results = returned(sets[0]) if len(sets) == 1 else []
    if not results or any(n.arg == "collate_fn" for _, n in source.of(ast.keyword)):
        return None
    for file, loop in source.of(ast.For):
        target = loop.target
        if is_call(loop.iter, "enumerate") and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        names = [tail(t) for t in target.elts] if isinstance(target, ast.Tuple) else []
        if len(names) != len(results) or not set(words(ast.unparse(loop.iter))) & LOADERS:
            continue
        for i, j in exchanged(names, results):
            if not alike(names[i], names[j]) or {names[i], names[j]} == {"x", "y"}:
                return (
                    f"line {loop.lineno} of {file} reads ({', '.join(names)}) from the batches, and the data set returns "
                    f"({', '.join(results)}) in line {sets[0].lineno}",
                    f"`{names[i]}` and `{names[j]}` are exchanged: each holds the other's values",
                )
    return None


def parts(source: Source) -> Fault | None:
    """Find `X_train, y_train, X_test, y_test = train_test_split(X, y)`: it returns both parts of X before those of y."""
    for file, node in source.of(ast.Assign):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=[_, second, third, _]) as names], value=ast.Call(args=[_, _]) as call
            ):
                if (
                    is_call(call, "train_test_split")
                    and set(words(tail(second))) & LABELS
                    and set(words(tail(third))) & INPUTS
                ):
                    return (
                        f"line {node.lineno} of {file} unpacks `{ast.unparse(names)}` from train_test_split()",
                        "it returns both parts of the first array, then both of the second: X_train, X_test, y_train, y_test",
                    )
    return None


def exchanged(given: list[str], names: list[str]) -> list[tuple[int, int]]:
    """Return the pairs of places that hold each other's name. Names that occur twice name nothing."""
    counts = Counter(given)
    count = min(len(given), len(names))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count) if given[i] == names[j] and given[j] == names[i]]
    return [(i, j) for i, j in pairs if given[i] and given[i] != given[j] and counts[given[i]] == counts[given[j]] == 1]


def plain(call: ast.Call) -> list[ast.expr]:
    """Return the positional arguments up to the first starred one."""
    return call.args[: next((i for i, a in enumerate(call.args) if isinstance(a, ast.Starred)), len(call.args))]


def returned(function: Function) -> list[str]:
    """Return the names of the tuple that a function returns; nothing if it returns anything else, or several of them."""
    found = [n.value for n in only(inside(function), ast.Return)]
    rows = {tuple(map(variable, v.elts)) if isinstance(v, ast.Tuple) else () for v in found}
    row = rows.pop() if len(rows) == 1 else ()
    return list(row) if len(row) > 1 and "" not in row else []


def names_or_dots(given: list[str]) -> str:
    """Return names, with dots for arguments that have none."""
    return ", ".join(n or "..." for n in given)


def of_scikit(node: ast.Import | ast.ImportFrom) -> bool:
    """Return whether a statement imports from scikit-learn."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "sklearn"
    return any(a.name.startswith("sklearn") for a in node.names)


def means(node: ast.AST, one: set[str], other: set[str]) -> bool:
    """Return whether the only variable of an argument is named by words of the one kind, and by none of the other."""
    libraries = {"np", "torch", "numpy", "concatenate", "cat"}
    stated = {w for name in {tail(n) for n in ast.walk(node)} - libraries for w in words(name)}
    return bool(stated & one) and not stated & other
