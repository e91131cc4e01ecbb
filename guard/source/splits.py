"""Names of a training, a validation and a test split that are read in each other's place, rows in two splits, and a scaler fitted on each."""

import ast
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import assigned, loaded, stored
from trainworthy.guard.source.calls import calls, methods, owner, trains
from trainworthy.guard.source.nodes import inside, number, only, tail, variable
from trainworthy.guard.source.reading import Source, names_in

SPLITS = {"train": "train", "training": "train", "trn": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
          "test": "test", "testing": "test", "eval": "eval", "evaluation": "eval"}  # fmt: skip
ROLES = dict.fromkeys(("support", "prototype", "prototypes", "protos"), "support") | {
    "query": "query",
    "queries": "query",
}
HELD_OUT = {"val", "test", "eval"}
KINDS = {"loader", "loaders", "dataloader", "dl", "set", "dataset", "ds", "data", "transform", "transforms", "tf", "tfm", "tfms", "aug",
         "augs", "idx", "indices", "index", "ids", "x", "y", "images", "labels", "targets", "texts", "files", "paths", "rows", "df", "iter",
         "sampler", "subset"}  # fmt: skip
ROWS = {"mask", "masks", "idx", "index", "indices", "nodes"}
LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "criterion", "loss_fn", "loss_func",
)  # fmt: skip
FITS = ("fit", "fit_transform")
FITTED = ("Scaler", "PCA", "Vectorizer", "SVD", "PowerTransformer", "QuantileTransformer")
"""Ends of the names of classes whose numbers depend on the rows they are fitted on. Encoders are left out: those of the same categories
are the same."""


def split_of(name: str) -> str:
    """Return the one split that a name tells: train, val, test or eval; empty for none or several."""
    found = {SPLITS[w] for w in words(name) if w in SPLITS}
    return found.pop() if len(found) == 1 else ""


def kind_of(name: str) -> tuple[str, ...]:
    """Return the other words of a name: (loader,) of `val_loader`."""
    return tuple(w for w in words(name) if w not in SPLITS)


def twin(source: Source) -> Fault | None:
    """Find a statement that makes or measures one split from another one's variable, while the split's own is never read."""
    for file, scope in source.plain_scopes:
        lines = only(inside(scope), (ast.Assign, ast.AnnAssign))
        made = {name: line for n in lines for name, line in stored(n).items() if split_of(name) and kind_of(name)[-1:]}
        known = read_names(source, scope) if made else set()
        idle = {n: at for n, at in made.items() if kind_of(n)[-1] in KINDS and n not in known}
        for line in lines:
            whole = {n for n in stored(line) if n in idle}
            if len({split_of(n) for n in whole}) < len(whole):  # inputs and targets of a split that is not used
                idle = {n: at for n, at in idle.items() if n not in whole}
        for node, names, reads in uses(scope) if idle else ():
            for lost, at in idle.items():
                mine = split_of(lost)
                others = [n for n in reads if kind_of(n) == kind_of(lost) and split_of(n) not in ("", mine)]
                others = [n for n in others if "train" in (mine, split_of(n))]
                named = {split_of(n) for n in names}
                if not others or named != {mine} or lost in names or any(split_of(n) == mine for n in reads):
                    continue
                what = next(n for n in names if split_of(n) == mine)
                return (
                    f"line {node.lineno} of {file} gives `{what}` the values of `{others[0]}`, and `{lost}` of line {at} is never read",
                    f"`{lost}` is meant: {'training' if mine == 'train' else 'the evaluation'} uses the other split's",
                )
    return None


def read_names(source: Source, scope: ast.AST) -> set[str]:
    """Return the names that are read in a function, or of a module in any file."""
    return source.known if isinstance(scope, ast.Module) else names_in(list(ast.walk(scope)))


def uses(scope: ast.AST) -> Iterator[tuple[ast.stmt, list[str], set[str]]]:
    """Yield the statements of a scope: what names tell of what they make (of a print: the words of its text), and the names they read."""
    for node in inside(scope):
        match node:
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() if node.value is not None:
                yield node, list(stored(node)), loaded(node.value)
            case ast.Expr(value=ast.Call()):
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                if texts:
                    yield node, [t for t in texts if split_of(t)], loaded(node)
            case ast.For(body=body):
                made = [n for s in body for n in ast.walk(s) if isinstance(n, (ast.Assign, ast.AugAssign))]
                names = [name for n in made for name in stored(n) if split_of(name)]
                yield node, names, loaded(node.iter) | {n for s in body for n in loaded(s)}


def shared(source: Source) -> Fault | None:
    """Find a training split and a held-out one that are overlapping slices of the same array: `train = data[:n]`, `val = data[:m]`; or a support
    set and queries (`z[:, :shot].mean(1)`, `z[:, :query]`)."""
    for file, scope in source.plain_scopes:
        lines = sorted(only(inside(scope), ast.Assign), key=lambda n: n.lineno)
        pairs = [(line, variable(target), value) for line in lines for target, value in assigned(line)]
        sizes: dict[str, list[ast.expr]] = {}
        for _, name, value in pairs:
            sizes.setdefault(name, []).append(value)
        made: list[tuple[str, ast.Subscript, int, ast.Slice, int]] = []
        """Name, value, axis and bounds of the slice, line."""
        for line, name, value in pairs:
            value, axis, cut = sliced(value, episodic=bool(role_of(name)))
            if cut is None or not (split_of(name) or role_of(name)):
                continue
            base, whole = ast.unparse(value.value), ast.unparse(value)
            for other, before, along, bounds, at in made:
                pair, roles = {split_of(name), split_of(other)}, {role_of(name), role_of(other)}
                same = ast.unparse(before.value) == base and along == axis
                again = any(at < n.lineno <= line.lineno and base in stored(n) for n in lines)
                held_out = "train" in pair and pair & HELD_OUT and kind_of(name) == kind_of(other)
                episode = roles == {"support", "query"}
                if same and not again and (held_out or episode) and overlap(bounds, cut, sizes):
                    return (
                        f"`{other}` is {ast.unparse(before)} in line {at} of {file}, and `{name}` is {whole} in line {line.lineno}: they overlap",
                        "the queries hold the support set: they must begin where it ends" if episode
                        else "the held-out split holds what is trained on: it must begin where the training split ends",
                    )  # fmt: skip
            made.append((name, value, axis, cut, line.lineno))
    return None


def role_of(name: str) -> str:
    """Return the part of an episode that a name tells: support (or the prototypes made of it) or query; empty for none or both."""
    found = {ROLES[w] for w in words(name) if w in ROLES}
    return found.pop() if len(found) == 1 else ""


def sliced(value: ast.expr, *, episodic: bool) -> tuple[Any, int, ast.Slice | None]:
    """Return a slice of a variable, its axis and its bounds: `data[:n]`; with `episodic` also `z[:, :n].mean(1)`. None: it is something else."""
    while episodic and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    match value:
        case ast.Subscript(value=ast.Name() | ast.Attribute(), slice=ast.Slice(step=None) as cut):
            return value, 0, cut
        case ast.Subscript(
            value=ast.Name() | ast.Attribute(),
            slice=ast.Tuple(elts=[ast.Slice(None, None, None), ast.Slice(step=None) as cut]),
        ) if episodic:
            return value, 1, cut
    return value, 0, None


def overlap(one: ast.Slice, other: ast.Slice, sizes: dict[str, list[ast.expr]]) -> bool:
    """Return whether two slices surely overlap: both begin at the start or end at the end, or the one's share ends behind the other's start."""
    match one.lower, one.upper, other.lower, other.upper:
        case (None, first, None, second) | (first, None, second, None):
            counted = (first, second)  # from the start, not from the end
            return all(bound is not None and not isinstance(bound, ast.UnaryOp) for bound in counted)
        case (None, end, start, None) | (start, None, None, end):
            last, begin = share(end, sizes), share(start, sizes)
            return last is not None and begin is not None and last[1] == begin[1] and begin[0] < last[0]
    return False


def share(bound: ast.expr, sizes: dict[str, list[ast.expr]], depth: int = 3) -> tuple[Fraction, str] | None:
    """Return (share, text of the whole) of `int(0.9 * len(x))`, or (number, "") of a number; None for anything else."""
    match bound:
        case ast.Name(id=name) if len(sizes.get(name, ())) == 1 and depth:
            return share(sizes[name][0], sizes, depth - 1) or (Fraction(1), name)
        case ast.Constant() if number(bound) is not None:
            return Fraction(str(bound.value)), ""
        case ast.Call(func=ast.Name(id="int" | "round"), args=[size]):
            return share(size, sizes, depth)
        case ast.Call(func=ast.Name(id="len")):
            return Fraction(1), ast.unparse(bound)
        case ast.BinOp(op=ast.Mult() | ast.Div() | ast.FloorDiv()):
            left, right = share(bound.left, sizes, depth), share(bound.right, sizes, depth)
            if not left or not right or (left[1] and right[1]):
                return None
            if isinstance(bound.op, ast.Mult):
                return left[0] * right[0], left[1] or right[1]
            return (left[0] / right[0], left[1]) if right[0] and not right[1] else None
    return None


def again(source: Source) -> Fault | None:
    """Find the line that fits one object on the evaluation's rows, after another line that fitted it on those of training."""
    for file, scope in source.plain_scopes:
        first: dict[str, int] = {}
        for node, fits in sorted(statements(scope), key=lambda row: row[0].lineno):
            named = {split_of(name) for name in (*stored(node), *loaded(node))} - {""}
            for name in fits:
                if "train" in named:
                    first.setdefault(name, node.lineno)
                elif named and name in first:
                    return (
                        f"line {node.lineno} of {file} fits `{name}` again, on the {min(named)} split; line {first[name]} fitted it on training's",
                        f"{name}.transform(...) is meant: the model gets inputs of another scale than in training",
                    )
            first = {name: line for name, line in first.items() if name not in stored(node)}
    return None


def statements(scope: ast.AST) -> Iterator[tuple[ast.stmt, set[str]]]:
    """Yield the statements of a scope that assign or fit, with the scalers that they fit."""
    lines = only(inside(scope), (ast.Assign, ast.AnnAssign, ast.Expr))
    scalers = {name for node in lines for name in built(node)}
    for node in lines:
        fits = [c.func.value for c in methods(ast.walk(node), *FITS)]
        yield node, {variable(f) for f in fits} & scalers


def built(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement gives to new scalers: `x = StandardScaler()`, `x, y = MinMaxScaler(), MinMaxScaler()`."""
    for target, call in assigned(node):
        match call:
            case ast.Call(func=ast.Attribute(value=made, attr="fit")):
                call = made  # StandardScaler().fit(rows)
        if isinstance(target, ast.Name) and isinstance(call, ast.Call) and tail(call.func).endswith(FITTED):
            yield target.id


def in_function(source: Source) -> Fault | None:
    """Find a function that fits the script's one scaler on whatever it gets, and gets rows of training and of the evaluation."""
    scalers = {name for _, n in source.of(ast.Assign) for name in built(n)}
    for file, function in source.functions if scalers else ():
        own, nodes = {a.arg for a in function.args.args}, list(ast.walk(function))
        for call in methods(nodes, *FITS):
            if not call.args or not loaded(call.args[0]) & own or owner(call) not in scalers:
                continue
            name = owner(call)
            kept = any(owner(c) == name for c in methods(nodes, "transform"))
            chosen = any(isinstance(n, (ast.If, ast.IfExp)) for n in nodes)
            if kept or chosen or any(name in stored(n) for n in nodes if isinstance(n, ast.stmt)):
                continue
            given = [n for _, n in source.of(ast.Call) if variable(n.func) == function.name and n.args]
            of = {split_of(word): n.lineno for n in given for word in loaded(n.args[0])}
            others = sorted(of.keys() & HELD_OUT)
            if "train" in of and others:
                return (
                    f"line {call.lineno} of {file} fits `{name}` on whatever {function.name}() gets: in line {of['train']} the rows of training, "
                    f"in line {of[others[0]]} those of the {others[0]} split",
                    f"{name}.transform(...) is meant, fitted once on training: each split is scaled by its own statistics",
                )
    return None


def all_rows(source: Source) -> Fault | None:
    """Find a training loss on all rows of a graph, where a mask of the training rows is read by the evaluation alone."""
    masks = {n for n in source.known if split_of(n) == "train" and set(kind_of(n)) & ROWS}
    held_out = {n for n in source.known if split_of(n) in HELD_OUT and set(kind_of(n)) & ROWS}
    if not masks or not held_out or any(tail(n.func).lower().endswith("loader") for _, n in source.of(ast.Call)):
        return None
    training, read = [], False
    for file, scope in source.scopes:
        nodes = list(inside(scope))
        if fault := beside(file, nodes, masks):
            return fault
        # How many rows there are
        counted = {id(n) for c in calls(nodes, "print", "info", "sum", "format") for n in ast.walk(c)}
        names = (n for n in nodes if isinstance(n, (ast.Name, ast.Attribute)) and id(n) not in counted)
        own = {tail(n) for n in names if isinstance(n.ctx, ast.Load)}
        if any(methods(nodes, "backward")):
            parts = [n for n in only(nodes, ast.For) if trains(n)]
            parts = [n for n in parts if not any(calls(ast.walk(n.iter), "range", "trange", "count"))]
            read |= bool(own & masks or parts)  # a sampler has chosen the rows of each part
            training.append((file, nodes))
        elif own & masks:  # a function that evaluates, or makes the masks, reads several of them
            read |= not own & held_out
            cut = [n for n in only(nodes, ast.Subscript) if tail(n.slice) in masks and isinstance(n.ctx, ast.Load)]
            read |= bool(cut) and not any(isinstance(n, ast.Compare) for n in nodes)
    for file, nodes in [] if read or len(training) != 1 else training:
        loss = next((n for n in nodes if isinstance(n, ast.Call) and tail(n.func) in LOSSES and len(n.args) > 1), None)
        if loss is not None and not any(isinstance(n, ast.Subscript) for a in loss.args for n in ast.walk(a)):
            mask = sorted(masks)[0]
            return (
                f"line {loss.lineno} of {file}: {ast.unparse(loss)} has all rows, also those that the evaluation scores; `{mask}` is not read there",
                f"the loss should have the training rows alone: both arguments with [{mask}]",
            )
    return None


def beside(file: str, nodes: list[ast.AST], masks: set[str]) -> Fault | None:
    """Find a training loss on `out` and `labels` where the same function scores `out[idx_train]` with `labels[idx_train]`."""
    cut = {(tail(n.value), tail(n.slice)) for n in only(nodes, ast.Subscript) if isinstance(n.value, ast.Name)}
    for call in calls(nodes, *LOSSES) if any(methods(nodes, "backward")) else ():
        given = [tail(a) for a in call.args[:2] if isinstance(a, ast.Name)]
        mask = next((m for m in sorted(masks) if len(given) == 2 and all((name, m) in cut for name in given)), "")
        if mask:
            return (
                f"line {call.lineno} of {file}: {ast.unparse(call)} has all rows, also those that the evaluation scores; the same function "
                f"reads both with [{mask}] elsewhere",
                f"the loss should have the training rows alone: both arguments with [{mask}]",
            )
    return None
