"""Finds a best score that nothing beats, a scheduler that waits for the other direction, and a metric that is never reset."""

import ast

from trainworthy.core.base.names import more_is_better, words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import named, paired, targets, variables
from trainworthy.guard.source.calls import is_call, methods, owner, unwrapped
from trainworthy.guard.source.nodes import FUNCTIONS, inside, nested, only, tail, written
from trainworthy.guard.source.reading import Source

ATTACKS = {"adv", "adversarial", "attack", "attacks", "delta", "deltas", "perturbation", "pgd"}
HUGE = 1e6  # what people write for infinity
LIBRARIES = ("torchmetrics", "monai")  # of metrics
RESULTS = ("compute", "aggregate")


def unbeatable(source: Source) -> Fault | None:
    """Find `best = 0`, then `if loss < best: best = loss`, or a best of minus infinity that is to fall, one of infinity that is to rise: no
    checkpoint is written, and early stopping counts from the start."""
    starts: dict[str, list[tuple[str, int, float]]] = {}
    for file, node in source.of(ast.Assign, ast.AnnAssign):
        for target in targets(node) if node.value is not None else ():
            for one, value in paired(target, node.value):
                if (begin := written(value)) is not None:
                    starts.setdefault(tail(one), []).append((file, node.lineno, begin))
    for file, node in source.of(ast.If):
        if not (found := replaced(node)):
            continue
        best, new, falls = found
        match starts.get(best):
            case [(where, line, value)]:  # set again for each fold or run: read as one value only
                worst = value <= -HUGE if falls else value >= HUGE
                if worst or (falls and value == 0 and False in (more_is_better(best), more_is_better(new))):
                    return (
                        f"`{best}` begins at {value:g} (line {line} of {where}), and line {node.lineno} of {file} sets it where `{new}` is "
                        f"{'below' if falls else 'above'} it: that never happens",
                        f"`{best} = {'' if falls else '-'}float('inf')` is meant, or {'>' if falls else '<'} in place of {'<' if falls else '>'}",
                    )
    return None


def contrary(source: Source) -> Fault | None:
    """Find `if val_loss > best: best = val_loss`, or the lowest accuracy that is kept as the best. An attack looks for the highest loss."""
    for file, scope in source.scopes:
        nodes = list(inside(scope))
        if ATTACKS & {w for n in only(nodes, ast.Name) for w in words(n.id)} or ATTACKS & set(
            words(getattr(scope, "name", ""))
        ):
            continue
        for node in only(nodes, ast.If):
            if not (found := replaced(node)) or "best" not in words(found[0]):
                continue
            best, new, falls = found
            if more_is_better(new) is falls:
                return (
                    f"line {node.lineno} of {file} keeps the {'lowest' if falls else 'highest'} `{new}` as `{best}`",
                    f"{'>' if falls else '<'} is meant: as it is, the worst result is kept, and early stopping waits for a worse one",
                )
    return None


WORSE = {"not", "no", "non", "worse", "below", "stale", "since", "without"}
"""Words of names for what is not the best."""


def best_is_worst(source: Source) -> Fault | None:
    """Find `is_best = err > best_err`, or an accuracy below the best one."""
    for file, scope in source.scopes:
        for name, line, value in named(inside(scope)):
            match value:
                case ast.Compare(
                    left=left, ops=[ast.Lt() | ast.LtE() | ast.Gt() | ast.GtE() as op], comparators=[right]
                ):
                    new, best, falls = tail(left), tail(right), isinstance(op, (ast.Lt, ast.LtE))
                    if "best" in words(new):
                        new, best, falls = best, new, not falls
                    kept = "best" in words(name) and not WORSE & set(words(name))
                    if kept and "best" in words(best) and more_is_better(new) is falls:
                        return (
                            f"line {line} of {file}: `{ast.unparse(value)}` is true where `{new}` is worse than the best so far",
                            f"{'>' if falls else '<'} is meant: as it is, the worst result is kept as the best",
                        )
    return None


def replaced(node: ast.If) -> tuple[str, str, bool] | None:
    """Return (best, new, whether lower is better) of `if new < best: best = new`."""
    match node.test:
        case ast.Compare(left=left, ops=[ast.Lt() | ast.Gt() as op], comparators=[right]):
            one, other, below = tail(left), tail(right), isinstance(op, ast.Lt)
        case _:
            return None
    lines = [(t, n.value) for n in only(node.body, ast.Assign) for t in n.targets]
    pairs = [(tail(one), value) for target, whole in lines for one, value in paired(target, whole)]
    for new, best, falls in ((one, other, below), (other, one, not below)):
        sets = [value for name, value in pairs if name == best]
        if new and best and len(sets) == 1 and new in map(tail, ast.walk(sets[0])):
            return best, new, falls
    return None


def plateau(source: Source) -> Fault | None:
    """Find `ReduceLROnPlateau(optimizer, "min")` that is stepped with `score`, where the script keeps `best = score` if it is higher."""
    made = [n for _, n in source.of(ast.Call) if is_call(n, "ReduceLROnPlateau")]
    modes = set(map(mode_of, made))
    if len(modes) != 1 or (mode := modes.pop()) not in ("min", "max"):
        return None
    kept: dict[str, tuple[str, int, set[bool]]] = {}
    for file, node in source.of(ast.If):
        if found := replaced(node):
            kept.setdefault(found[1], (file, node.lineno, set()))[2].add(found[2])
    names = {tail(t) for _, n in source.of(ast.Assign) if n.value in made for t in n.targets}
    for file, node in source.of(ast.Call):
        match node:
            case ast.Call(func=ast.Attribute(attr="step"), args=[given, *_]) if owner(node) in names:
                value = tail(given)
                where, line, ways = kept.get(value, ("", 0, set()))
                if ways == {mode == "max"}:
                    return (
                        f"line {node.lineno} of {file} gives `{value}` to a ReduceLROnPlateau that waits for a {mode}imum, and line {line} of "
                        f"{where} keeps the {'highest' if mode == 'min' else 'lowest'} `{value}` as the best",
                        f"mode='{'max' if mode == 'min' else 'min'}' is meant: the rate is cut while `{value}` improves",
                    )
    return None


def mode_of(call: ast.Call) -> str:
    """Return the mode of a ReduceLROnPlateau that is written out; empty for one that is computed."""
    match [k.value for k in call.keywords if k.arg == "mode"] or call.args[1:2]:
        case []:
            return "min" if all(k.arg for k in call.keywords) else ""
        case [ast.Constant(value=mode), *_]:
            return str(mode)
    return ""


def metric(source: Source) -> Fault | None:
    """Find `metric = Metric()` before a loop over epochs, with `metric.compute()` or `metric.aggregate()` in it, and no `reset()` anywhere: it is
    a mean over all epochs so far."""
    if any("reset" in n.attr and "env" not in tail(n.value).lower() for _, n in source.of(ast.Attribute)):
        return None
    kinds = {c.name for _, c in source.of(ast.ClassDef) if resettable(c)}
    imports = [n for _, n in source.of(ast.ImportFrom) if (n.module or "").split(".")[0] in LIBRARIES]
    kinds |= {a.asname or a.name for n in imports for a in n.names}
    for file, scope in source.scopes if kinds else ():
        own = list(inside(scope))
        made = {name: line for name, line, value in named(own) if is_call(value, *kinds)}
        for loop in only(own, ast.For) if made else ():
            passes = nested(loop)  # without one, it is computed over the batches of one pass
            again = {name for name, _, _ in named(ast.walk(loop))}
            for call in methods(ast.walk(loop), *RESULTS) if passes else ():
                name = owner(call)
                if name in made and name not in again and made[name] < loop.lineno and id(call) not in passes:
                    return (
                        f"line {call.lineno} of {file} computes `{name}` in each turn of the loop of line {loop.lineno}, and nothing resets it",
                        f"it is a mean over all epochs so far: {name}.reset() after it",
                    )
    return None


def resettable(kind: ast.ClassDef) -> bool:
    """Return whether a class of the script has a `reset()` and a result."""
    names = {f.name for f in kind.body if isinstance(f, FUNCTIONS)}
    return "reset" in names and bool(names & set(RESULTS))


MEANS = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
         "binary_cross_entropy_with_logits", "CrossEntropyLoss", "NLLLoss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss",
         "BCEWithLogitsLoss")  # fmt: skip
"""Losses whose `reduction` is the mean unless it is given."""


def means_over_samples(source: Source) -> Fault | None:
    """Find `total += F.cross_entropy(logits, y).item()` and `count += y.numel()` in one loop, then `total / count`: means of batches are divided
    by samples."""
    criteria = {
        name for _, scope in source.scopes for name, _, value in named(ast.walk(scope)) if is_mean(value, set())
    }
    for file, function in source.scopes:
        nodes = list(inside(function))
        ratios = [(tail(n.left), tail(n.right), n.lineno) for n in only(nodes, ast.BinOp) if isinstance(n.op, ast.Div)]
        for loop in only(nodes, ast.For) if ratios else ():
            local = {name: value for name, _, value in named(ast.walk(loop))}
            added = [n for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)]
            sums = [(tail(n.target), n.value) for n in added]
            means = {name for name, value in sums if is_mean(held(value, local), criteria)}
            counts = {name for name, value in sums if counts_samples(value)}
            for above, below, line in ratios:
                if above in means and below in counts and line > loop.lineno:
                    return (
                        f"line {line} of {file} divides `{above}`, a sum of the means of batches, by `{below}`, the number of samples",
                        'the sum over samples is meant: reduction="sum", or the mean times the size of its batch',
                    )
    return None


def held(value: ast.expr, local: dict[str, ast.expr]) -> ast.AST:
    """Return what is added: the call whose result a name holds, without `.item()`."""
    value = unwrapped(value, "item", "detach", "cpu", "float")
    return local.get(tail(value), value)


def is_mean(value: ast.AST, criteria: set[str]) -> bool:
    """Return whether a call is that of a loss with its usual reduction, or of one that a name of `criteria` holds."""
    if not isinstance(value, ast.Call) or any(k.arg in ("reduction", "reduce", "size_average") for k in value.keywords):
        return False
    return tail(value.func) in MEANS or tail(value.func) in criteria


def counts_samples(value: ast.AST) -> bool:
    """Return whether a value is `y.numel()`, `len(y)`, `y.size(0)` or `y.shape[0]`."""
    match value:
        case ast.Call(func=ast.Attribute(attr="numel"), args=[]) | ast.Call(func=ast.Name(id="len"), args=[_]):
            return True
        case ast.Call(func=ast.Attribute(attr="size"), args=[ast.Constant(value=0)]):
            return True
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant(value=0)):
            return True
    return False


SORTS = ("argsort", "sort", "topk", "sorted", "lexsort")


def sorted_once(source: Source) -> Fault | None:
    """Find `rank = scores.argsort()[0]`: the number of the best item, where the rank of item 0 is meant (`argsort().argsort()[0]`)."""
    for file, scope in source.scopes:
        own = list(named(inside(scope)))
        orders = {name for name, _, value in own if any(is_call(n, *SORTS) for n in ast.walk(value))}
        for name, line, value in own:
            match unwrapped(value, "item", "cpu", "float", "long"):
                case ast.Subscript(
                    value=ast.Call(func=ast.Attribute(attr="argsort")) as call, slice=ast.Constant(value=int())
                ):
                    sorted_twice = any(
                        is_call(n, *SORTS) for n in ast.walk(call) if n is not call
                    ) or orders & variables(call)
                    if "rank" in words(name) and not sorted_twice:
                        return (
                            f"line {line} of {file}: `{name}` is the first entry of one argsort(), so the number of the best item",
                            "the rank of item 0 is meant: scores.argsort().argsort()[0]",
                        )
    return None
