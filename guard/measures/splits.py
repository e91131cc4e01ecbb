"""Names of a training, a validation and a test split that are read in each other's place, and values that are never read."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Source, inside, names_in, words

SPLITS = {"train": "train", "training": "train", "trn": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
          "test": "test", "testing": "test", "eval": "eval", "evaluation": "eval"}  # fmt: skip
KINDS = {"loader", "loaders", "dataloader", "dl", "set", "dataset", "ds", "data", "transform", "transforms", "tf", "tfm", "tfms", "aug",
         "augs", "idx", "indices", "index", "ids", "x", "y", "images", "labels", "targets", "texts", "files", "paths", "rows", "df", "iter",
         "sampler", "subset"}  # fmt: skip
CHANGED = {"aug", "augmented", "augs", "noisy", "noised", "masked", "mixed", "jittered", "cropped", "flipped", "perturbed", "corrupted",
           "shifted", "smoothed", "normalized", "normalised", "standardized", "standardised", "scaled", "rescaled", "clipped",
           "shuffled", "packed"}  # fmt: skip
INDIRECT = {"locals", "globals", "vars", "eval", "exec"}

Scope = ast.AST


def split_of(name: str) -> str:
    """Return the one split that a name tells: train, val, test or eval; empty for none or several."""
    found = {SPLITS[w] for w in words(name) if w in SPLITS}
    return found.pop() if len(found) == 1 else ""


def kind_of(name: str) -> tuple[str, ...]:
    """Return the other words of a name: (loader,) of `val_loader`."""
    return tuple(w for w in words(name) if w not in SPLITS)


def scopes(source: Source) -> Iterator[tuple[str, Scope]]:
    """Yield the functions and modules of a script that read their variables by name alone."""
    if any(isinstance(n, ast.Call) and getattr(n.func, "id", "") in INDIRECT for _, n in source.nodes):
        return
    yield from ((file, n) for file, n in source.nodes if isinstance(n, (ast.Module, *FUNCTIONS)))


def read_names(source: Source, scope: Scope) -> set[str]:
    """Return the names that are read in a function, or of a module in any file."""
    return source.known if isinstance(scope, ast.Module) else names_in(list(ast.walk(scope)))


def stored(node: ast.AST) -> dict[str, int]:
    """Return the names that a statement assigns, with their lines."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [
        n
        for t in targets
        if t is not None
        for n in ast.walk(t)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    return {n.id: n.lineno for n in names}


def loaded(node: ast.AST) -> set[str]:
    """Return the names that a node reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def twin(source: Source) -> Fault | None:
    """Find a statement that makes or measures one split from another one's variable, while the split's own is never read."""
    for file, scope in scopes(source):
        lines = [n for n in inside(scope) if isinstance(n, (ast.Assign, ast.AnnAssign))]
        made = {name: line for n in lines for name, line in stored(n).items() if split_of(name) and kind_of(name)[-1:]}
        known = read_names(source, scope) if made else set()
        idle = {n: at for n, at in made.items() if kind_of(n)[-1] in KINDS and n not in known}
        for whole in ({n for n in stored(line) if n in idle} for line in lines):
            if len({split_of(n) for n in whole}) < len(
                whole
            ):  # inputs and targets of a split that this function does without
                idle = {n: at for n, at in idle.items() if n not in whole}
        if not idle:
            continue
        for node, names, reads in uses(scope):
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


def uses(scope: Scope) -> Iterator[tuple[ast.stmt, list[str], set[str]]]:
    """Yield the statements of a scope: what names tell of what they make (of a print: the words of its text), and the names they read."""
    for node in inside(scope):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            yield node, list(stored(node)), loaded(node.value)
        elif isinstance(node, ast.Expr):
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            if texts and isinstance(node.value, ast.Call):
                yield node, [t for t in texts if split_of(t)], loaded(node)
        elif isinstance(node, ast.For):
            names = [
                n
                for part in node.body
                for x in ast.walk(part)
                if isinstance(x, (ast.Assign, ast.AugAssign))
                for n in stored(x)
            ]
            yield node, [n for n in names if split_of(n)], loaded(node.iter) | {n for b in node.body for n in loaded(b)}


def loops(scope: Scope) -> list[ast.AST]:
    """Return the outermost loops of a scope in which `backward()` is called."""
    found = [n for n in inside(scope) if isinstance(n, (ast.For, ast.While)) and trains(n)]
    return [n for n in found if not any(m is not n and any(x is n for x in ast.walk(m)) for m in found)]


def trains(node: ast.AST) -> bool:
    return any(
        isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "backward"
        for n in ast.walk(node)
    )


def idle_values(source: Source) -> Iterator[tuple[str, ast.AST, ast.Assign, str]]:
    """Yield (file, loop, statement, name) of each name that a training loop computes and that nothing reads."""
    for file, scope in scopes(source):
        found = [(loop, n) for loop in loops(scope) for n in ast.walk(loop) if isinstance(n, ast.Assign)]
        known = read_names(source, scope) if found else set()
        for loop, node in found:
            name = getattr(node.targets[0], "id", "")
            computed = isinstance(node.value, (ast.Call, ast.BinOp)) and loaded(node.value)
            if name and computed and not name.startswith("_") and name not in known:
                yield file, loop, node, name


def lost_input(source: Source) -> Fault | None:
    """Find a changed copy of an input (`x_aug`, `noisy_x`) that nothing reads, while a later call gets the input itself."""
    for file, loop, node, name in idle_values(source):
        changed = [w for w in words(name) if w in CHANGED]
        for base in loaded(node.value) if changed else ():
            rest = [w for w in words(name) if w not in CHANGED]
            later = [n for n in ast.walk(loop) if isinstance(n, ast.Call) and n.lineno > node.lineno]
            used = next((n for n in later if any(getattr(a, "id", "") == base for a in n.args)), None)
            if used is not None and rest and rest == words(base):
                return (
                    f"line {node.lineno} of {file} computes `{name}` from `{base}`, and nothing reads it; line {used.lineno} uses `{base}`",
                    f"`{name}` is meant in the later lines, or the line that computes it has no effect",
                )
    return None


def unread(source: Source) -> str:
    """Return as a remark which values of the training loop are computed and never read."""
    found = list(dict.fromkeys(f"{name} (line {node.lineno} of {file})" for file, _, node, name in idle_values(source)))
    return f"; computed in the training loop and never read: {', '.join(found[:3])}" if found else ""
