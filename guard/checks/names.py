"""The check of a script's source by its names: arguments in the order of their parameters, each split read by its own name."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.checks.results import finding, skip
from trainworthy.guard.measures import (
    backtracking,
    best_start,
    contrary_rates,
    denoising_order,
    dropped_values,
    entropy_weight,
    episode_ends,
    joined_parts,
    multiplied,
    never_reset,
    one_way,
    overlapping_slices,
    pixel_views,
    refitted,
    replaced_early,
    reshaped_pairs,
    returns,
    shuffled_rows,
    splits,
    summed_losses,
    transitions,
    twice,
)
from trainworthy.guard.measures.caches import Caches
from trainworthy.guard.measures.source import (
    FUNCTIONS,
    Function,
    Source,
    alike,
    inside,
    parameters,
    read,
    symmetric,
    tail,
    words,
)


def check(script: Path) -> dict:
    """Read the script and the modules of its folder that it imports. Nothing is run."""
    source = read(script)
    if not source.trees:
        return skip("names", "the script's source cannot be read")
    calls = Calls(source)
    rules: tuple[Callable[[], Fault | None], ...] = (
        calls.arguments,
        calls.keywords,
        calls.library,
        calls.unpacked,
        calls.samples,
        lambda: splits.twin(source),
        lambda: splits.lost_input(source),
        lambda: overlapping_slices.shared(source),
        lambda: refitted.again(source),
        lambda: refitted.in_function(source),
        lambda: backtracking.wrong_order(source),
        lambda: reshaped_pairs.mixed(source),
        lambda: twice.same_input(source),
        lambda: transitions.first_kept(source),
        lambda: transitions.unread_actions(source),
        lambda: transitions.overwritten(source),
        lambda: transitions.other_state(source),
        lambda: entropy_weight.turned(source),
        lambda: contrary_rates.plateau(source),
        lambda: dropped_values.unused(source, [row[:3] for row in calls.reached]),
        lambda: dropped_values.rebound(source),
        lambda: returns.wrong_order(source),
        lambda: returns.redrawn(source),
        lambda: summed_losses.replaced(source),
        lambda: best_start.unbeatable(source),
        lambda: shuffled_rows.apart(source),
        lambda: joined_parts.interleaved(source),
        lambda: multiplied.temperature(source),
        lambda: episode_ends.shifted(source),
        lambda: never_reset.metric(source),
        lambda: one_way.back_alone(source),
        lambda: denoising_order.forwards(source),
        lambda: pixel_views.larger(source),
        lambda: replaced_early.carried(source),
        lambda: turned_sign(source),
        lambda: Caches(source, [row[1:] for row in calls.reached]).fault(),
    )
    for rule in rules:
        if fault := rule():
            return finding("names", *fault)
    files = len(source.trees)
    measured = f"{calls.followed:,} calls of {len(calls.functions):,} functions in {files} file{'s' * (files != 1)}"
    return finding("names", measured + splits.unread(source))


class Calls:
    """The calls of a script's own functions and classes, with the function that each of them reaches."""

    def __init__(self, source: Source):
        self.source, self.followed = source, 0
        self.functions: list[Function] = []
        self.by_name: dict[str, list[Function]] = {}  # functions that are no methods
        self.classes: dict[str, list[ast.ClassDef]] = {}
        self.owner: dict[int, ast.ClassDef] = {}  # method -> its class
        self.within: dict[int, tuple[Function, ...]] = {}  # node -> functions around it
        self.made: dict[str, list[str]] = {}  # variable -> names of what it is assigned a call of; "" for anything else
        for tree in source.trees.values():
            self._collect(tree, None, ())
        self.reached = list(self._reached())

    def _collect(self, node: ast.AST, home: ast.ClassDef | None, around: tuple[Function, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            self.within[id(child)] = around
            if isinstance(child, ast.ClassDef):
                self.classes.setdefault(child.name, []).append(child)
                self._collect(child, child, around)
            elif isinstance(child, FUNCTIONS):
                self.functions.append(child)
                if isinstance(node, ast.ClassDef):
                    self.owner[id(child)] = node
                else:
                    self.by_name.setdefault(child.name, []).append(child)
                self._collect(child, home, (*around, child))
            else:
                if isinstance(child, ast.Assign):
                    for target in child.targets:
                        for one in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                            self.made.setdefault(tail(one), []).append(
                                constructed(child.value) if one is target else ""
                            )
                self._collect(child, home, around)

    def _reached(self) -> Iterator[tuple[str, ast.Call, Function, list[str]]]:
        """Yield (file, call, function, names of the parameters that positional arguments get)."""
        for name, node in self.source.nodes:
            if isinstance(node, ast.Call) and (found := self._function(node)) is not None:
                bound = id(found) in self.owner and not any(tail(d) == "staticmethod" for d in found.decorator_list)
                if node not in self.within.get(id(node), ()) and found not in self.within.get(id(node), ()):
                    self.followed += 1
                    yield name, node, found, parameters(found, bound)

    def _function(self, call: ast.Call) -> Function | None:
        """Return the one function of the script that a call reaches; None if that is not certain."""
        name = tail(call.func)
        if (
            isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "self"
        ):
            around = self.within.get(id(call), ())
            mine = next((self.owner[id(f)] for f in reversed(around) if id(f) in self.owner), None)
            if mine is not None and (found := method(mine, name)) is not None:
                return found
        made = set(self.made.get(name, ()))
        if len(made) == 1 and (kind := next(iter(made))) in self.classes and name not in self.by_name:
            return self._of_class(kind, ("forward", "__call__"))
        if made or isinstance(call.func, ast.Attribute):
            return None
        if len(self.by_name.get(name, ())) == 1 and name not in self.classes:
            return self.by_name[name][0]
        return self._of_class(name, ("__init__",)) if name not in self.by_name else None

    def _of_class(self, kind: str, names: tuple[str, ...]) -> Function | None:
        found = self.classes.get(kind, ())
        return next((m for n in names if (m := method(found[0], n)) is not None), None) if len(found) == 1 else None

    # --- rules

    def arguments(self) -> Fault | None:
        """Find two arguments that have each other's name."""
        for name, call, function, names in self.reached:
            given = [tail(a) for a in plain(call)][: len(names)]
            for i, j in exchanged(given, names):
                straight = any(
                    f is function and [tail(a) for a in plain(c)][i : j + 1 : j - i] == [given[j], given[i]]
                    for _, c, f, _ in self.reached
                )
                if alike(given[i], given[j]) or straight or symmetric(function, names[i], names[j]):
                    continue
                what = self.owner[id(function)].name if id(function) in self.owner else function.name
                return (
                    f"line {call.lineno} of {name}: {ast.unparse(call.func)}() gets ({', '.join(names_or_dots(given))}), and {what} in line "
                    f"{function.lineno} takes ({', '.join(names[: len(given)])})",
                    f"`{given[i]}` and `{given[j]}` are exchanged: pass them in the order of the parameters, or by keyword",
                )
        return None

    def keywords(self) -> Fault | None:
        """Find two keywords that get each other's name."""
        calls = [(name, n) for name, n in self.source.nodes if isinstance(n, ast.Call) and len(n.keywords) > 1]
        for name, call in calls:
            keys, values = [k.arg or "" for k in call.keywords], [tail(k.value) for k in call.keywords]
            for i, j in exchanged(values, keys):
                straight = any(
                    tail(c.func) == tail(call.func)
                    and {(keys[i], keys[i]), (keys[j], keys[j])} <= {(k.arg or "", tail(k.value)) for k in c.keywords}
                    for _, c in calls
                )
                if not alike(keys[i], keys[j]) and not straight:
                    return (
                        f"line {call.lineno} of {name}: {ast.unparse(call.func)}() gets {keys[i]}={ast.unparse(call.keywords[i].value)} and "
                        f"{keys[j]}={ast.unparse(call.keywords[j].value)}",
                        f"`{keys[i]}` and `{keys[j]}` are exchanged",
                    )
        return None

    def library(self) -> Fault | None:
        """Find arguments of a library's function in the wrong order, by the words of their names."""
        scores = {a.asname or a.name for _, n in self.source.nodes if of_scikit(n) for a in n.names}  # type: ignore[attr-defined]
        for name, node in self.source.nodes:
            called = tail(node.func) if isinstance(node, ast.Call) else ""
            if called not in KNOWN or called in self.by_name or called in self.classes:
                continue
            base = node.func.value if isinstance(node.func, ast.Attribute) else node.func  # type: ignore[attr-defined]
            if called in SCORES and ast.unparse(base) not in scores | {"sklearn.metrics"}:
                continue  # that of another library, with another order
            at, (first, second), (one, two) = KNOWN[called]
            given = plain(node)[at : at + 2]  # type: ignore[arg-type]
            if len(given) == 2 and means(given[0], two, one) and means(given[1], one, two):
                return (
                    f"line {node.lineno} of {name}: {called}() gets `{ast.unparse(given[0])}` for its {first} and "  # type: ignore[attr-defined]
                    f"`{ast.unparse(given[1])}` for its {second}",
                    f"the two are exchanged: {called}() takes {first} before {second}",
                )
        return None

    def unpacked(self) -> Fault | None:
        """Find two results that are unpacked into each other's name."""
        found: list[tuple[str, ast.Assign, Function, list[str], list[str]]] = []
        reached = {id(call): function for _, call, function, _ in self.reached}
        for name, node in self.source.nodes:
            if (
                not isinstance(node, ast.Assign)
                or not isinstance(node.value, ast.Call)
                or id(node.value) not in reached
            ):
                continue
            function, target = reached[id(node.value)], node.targets[0]
            if isinstance(target, ast.Tuple) and (results := returned(function)):
                names = [tail(t) for t in target.elts]
                if len(names) == len(results):
                    found.append((name, node, function, names, results))
        for name, node, function, names, results in found:
            given = {tail(a) for a in node.value.args}  # type: ignore[attr-defined]
            for i, j in exchanged(names, results):
                straight = any(f is function and (n[i], n[j]) == (r[i], r[j]) for _, _, f, n, r in found)
                meant = alike(names[i], names[j]) and {names[i], names[j]} != {"x", "y"}
                if not (meant or straight or {names[i], names[j]} <= given):
                    return (
                        f"line {node.lineno} of {name} unpacks ({', '.join(names_or_dots(names))}), and {function.name}() in line "
                        f"{function.lineno} returns ({', '.join(results)})",
                        f"`{names[i]}` and `{names[j]}` are exchanged: each holds the other's values",
                    )
        return None

    def samples(self) -> Fault | None:
        """Find a loop over batches whose names are exchanged, by those that the one data set of the script returns."""
        sets = [f for f in self.functions if f.name == "__getitem__" and id(f) in self.owner]
        results = returned(sets[0]) if len(sets) == 1 else []
        if not results or any(isinstance(n, ast.keyword) and n.arg == "collate_fn" for _, n in self.source.nodes):
            return None
        for name, node in self.source.nodes:
            if not isinstance(node, ast.For):
                continue
            target = node.target
            if (
                isinstance(node.iter, ast.Call)
                and tail(node.iter.func) == "enumerate"
                and isinstance(target, ast.Tuple)
            ):
                target = target.elts[-1]
            names = [tail(t) for t in target.elts] if isinstance(target, ast.Tuple) else []
            if len(names) != len(results) or not set(words(ast.unparse(node.iter))) & LOADERS:
                continue
            for i, j in exchanged(names, results):
                if not alike(names[i], names[j]) or {names[i], names[j]} == {"x", "y"}:
                    return (
                        f"line {node.lineno} of {name} reads ({', '.join(names)}) from the batches, and the data set returns "
                        f"({', '.join(results)}) in line {sets[0].lineno}",
                        f"`{names[i]}` and `{names[j]}` are exchanged: each holds the other's values",
                    )
        return None


LOADERS = {"loader", "dataloader", "dl", "train", "batches"}
MEAN, SPREAD = {"mean", "means", "mu", "loc", "avg"}, {"std", "stds", "sd", "sigma", "stdev", "scale"}
TRUE = {"true", "target", "targets", "label", "labels", "truth", "gold", "gt", "actual"}
SAID = {"pred", "preds", "prediction", "predictions", "predicted", "output", "outputs", "logits", "score", "scores",
        "prob", "probs", "hat"}  # fmt: skip
MOMENTS = (("mean", "standard deviation"), (MEAN, SPREAD))
ANSWERS = (("true values", "predictions"), (TRUE, SAID))
SCORES = ("precision_score", "recall_score", "r2_score", "roc_auc_score", "average_precision_score", "log_loss", "fbeta_score",
          "precision_recall_fscore_support", "classification_report", "confusion_matrix", "roc_curve", "precision_recall_curve",
          "brier_score_loss")  # fmt: skip
KNOWN = {"Normalize": (0, *MOMENTS), "Normal": (0, *MOMENTS), **dict.fromkeys(SCORES, (0, *ANSWERS))}
"""Functions of torchvision, torch and scikit-learn: place of the first of two arguments, what these are, words of their names. Functions that are
symmetric (accuracy, mean squared error) are left out."""


def of_scikit(node: ast.AST) -> bool:
    """Return whether a statement imports from scikit-learn."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "sklearn"
    return isinstance(node, ast.Import) and any(a.name.startswith("sklearn") for a in node.names)


def turned_sign(source: Source) -> Fault | None:
    """Find `x =+ y`, which sets x to y."""
    for file, node in source.nodes:
        if (
            not isinstance(node, ast.Assign)
            or not isinstance(node.value, ast.UnaryOp)
            or not isinstance(node.value.op, ast.UAdd)
        ):
            continue
        target, value = node.targets[-1], node.value
        beside = target.end_lineno == value.lineno and value.col_offset - (target.end_col_offset or 0) == 2
        if beside and not isinstance(value.operand, ast.Constant):
            return (
                f"line {node.lineno} of {file} is `{ast.unparse(target)} =+ ...`: it replaces the value and adds nothing to it",
                "`+=` is meant",
            )
    return None


def means(node: ast.AST, one: set[str], other: set[str]) -> bool:
    """Return whether the only variable of an argument is named by words of the one kind, and by none of the other."""
    found = {tail(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))} - {
        "np",
        "torch",
        "numpy",
        "concatenate",
        "cat",
    }
    stated = {w for n in found for w in words(n)}
    return bool(stated & one) and not stated & other


def method(home: ast.ClassDef, name: str) -> Function | None:
    """Return a class's own method; None if it has several of that name (properties, overloads)."""
    found = [n for n in home.body if isinstance(n, FUNCTIONS) and n.name == name]
    return found[0] if len(found) == 1 else None


def constructed(value: ast.AST) -> str:
    """Return the name that is called in `Name(...)` or `Name(...).to(device)`; empty for anything else."""
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ("to", "cuda", "train", "eval")
    ):
        value = value.func.value
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""


def plain(call: ast.Call) -> list[ast.expr]:
    """Return the positional arguments up to the first starred one."""
    return call.args[: next((i for i, a in enumerate(call.args) if isinstance(a, ast.Starred)), len(call.args))]


def exchanged(given: list[str], names: list[str]) -> list[tuple[int, int]]:
    """Return the pairs of places that hold each other's name. Names that occur twice name nothing."""
    counts = Counter(given)
    count = min(len(given), len(names))
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count) if given[i] == names[j] and given[j] == names[i]]
    return [(i, j) for i, j in pairs if given[i] and given[i] != given[j] and counts[given[i]] == counts[given[j]] == 1]


def returned(function: Function) -> list[str]:
    """Return the names of the tuple that a function returns; nothing if it returns anything else, or several of them."""
    found = [n.value for n in inside(function) if isinstance(n, ast.Return)]
    rows = [
        tuple(e.id if isinstance(e, ast.Name) else "" for e in v.elts) if isinstance(v, ast.Tuple) else ()
        for v in found
    ]
    return list(rows[0]) if len(set(rows)) == 1 and len(rows[0]) > 1 and "" not in rows[0] else []


def names_or_dots(given: list[str]) -> list[str]:
    """Return names, with dots for arguments that have none."""
    return [n or "..." for n in given]
