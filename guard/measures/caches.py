"""Results that were kept in the order of one pass over a loader and are read by the number of a batch of another, shuffled pass."""

import ast
from collections.abc import Iterable, Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.source import FUNCTIONS, Function, Source, inside, parameters, tail
from trainworthy.guard.measures.splits import trains

WRAPPERS = ("enumerate", "tqdm", "track")
ORDERED = ("sampler", "batch_sampler", "generator")
"""Arguments of a loader whose order may repeat."""


class Caches:
    """`calls`: (call, function, names of the parameters that positional arguments get) of the script's own functions."""

    def __init__(self, source: Source, calls: Iterable[tuple[ast.Call, Function, list[str]]]):
        self.source = source
        self.bound: dict[tuple[int, str], set[str]] = {}  # function and parameter -> names that calls pass
        self.reached: dict[int, tuple[Function, list[str]]] = {}
        for call, function, names in calls:
            self.reached[id(call)] = (function, names)
            given = dict(zip(names, map(tail, call.args), strict=False)) | {
                k.arg or "": tail(k.value) for k in call.keywords
            }
            for name in parameters(function, bound=False):
                self.bound.setdefault((id(function), name), set()).add(given.get(name, ""))

    def fault(self) -> Fault | None:
        """Find a training loop over a shuffled loader that reads kept results by its own count."""
        loaders, kept = set(self._shuffled()), self._kept()
        for file, scope in self._scopes():
            for loop in (n for n in inside(scope) if isinstance(n, ast.For) and trains(n)):
                name, count = looped(loop)
                if not count or self._name(scope, name) not in loaders:
                    continue
                for node in ast.walk(loop):
                    cache = self._name(scope, tail(node.value)) if isinstance(node, ast.Subscript) else ""
                    reads = cache in kept and isinstance(node.ctx, ast.Load) and by(node.slice, count)  # type: ignore[attr-defined]
                    if reads and kept[cache] is not loop:
                        return (
                            f"line {node.lineno} of {file} reads `{ast.unparse(node)}` in a loop over `{name}`, which is shuffled, and "  # type: ignore[attr-defined]
                            f"`{cache}` has the order of the loop in line {kept[cache].lineno}",
                            "each pass over a shuffled loader has another order: keep the results by the index of their sample, in the data set",
                        )
        return None

    def _scopes(self) -> Iterator[tuple[str, ast.AST]]:
        yield from ((file, n) for file, n in self.source.nodes if isinstance(n, (ast.Module, *FUNCTIONS)))

    def _name(self, scope: ast.AST, name: str) -> str:
        """Return the name that every call of a function passes for its parameter; of any other variable its own name."""
        given = self.bound.get((id(scope), name))
        return name if given is None else next(iter(given)) if len(given) == 1 else ""

    def _shuffled(self) -> Iterator[str]:
        """Yield the names that are always a loader with shuffle=True, of no sampler and no generator of its own."""
        made: dict[str, list[bool]] = {}
        for _, node in self.source.nodes:
            for target, value in pairs(node):
                keys = {k.arg: k.value for k in value.keywords} if isinstance(value, ast.Call) else {}
                shuffle = keys.get("shuffle")
                drawn = isinstance(shuffle, ast.Constant) and shuffle.value is True and not keys.keys() & set(ORDERED)
                made.setdefault(target, []).append(drawn and tail(value.func) == "DataLoader")  # type: ignore[attr-defined]
        return (name for name, rows in made.items() if name and all(rows))

    def _kept(self) -> dict[str, ast.For]:
        """Return the lists that a loop over a loader fills, also inside of a function that returns them, with the loop."""
        found: dict[str, ast.For] = {}
        filled: dict[int, ast.For] = {}  # function -> the loop that fills what it returns
        for _, scope in self._scopes():
            for loop in (n for n in inside(scope) if isinstance(n, ast.For) and not trains(n)):
                lists = {tail(c.func.value) for c in appends(loop)}  # type: ignore[attr-defined]
                loads = [looped(loop)[0], self._name(scope, looped(loop)[0])]
                if not lists or not any("loader" in n.lower() or n.lower().endswith("dl") for n in loads):
                    continue
                found |= dict.fromkeys(lists - {""}, loop)
                back = [n.value for n in inside(scope) if isinstance(n, ast.Return) and n.value is not None]
                if isinstance(scope, FUNCTIONS) and len(back) == 1 and len(lists) == 1 and holds(back[0], lists):
                    filled[id(scope)] = loop
        for _, node in self.source.nodes:
            for target, value in pairs(node):
                if target and id(value) in self.reached and id(self.reached[id(value)][0]) in filled:
                    found[target] = filled[id(self.reached[id(value)][0])]
                elif target and isinstance(value, ast.Call) and tail(value.func) in ("cat", "stack") and value.args:
                    joined = found.get(tail(value.args[0]))
                    found |= {} if joined is None else {target: joined}
        return found


def pairs(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """Return the names that an assignment gives values, with these."""
    if not isinstance(node, ast.Assign):
        return []
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple):
        values = (
            value.elts
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            else [ast.Constant(0)] * len(target.elts)
        )
        return [(tail(t), v) for t, v in zip(target.elts, values, strict=True)]
    return [(tail(target), value)]


def looped(loop: ast.For) -> tuple[str, str]:
    """Return the name of what a loop runs over, and that of its count; empty without `enumerate`."""
    node, counted = loop.iter, False
    while isinstance(node, ast.Call) and tail(node.func) in WRAPPERS and node.args:
        counted |= tail(node.func) == "enumerate"
        node = node.args[0]
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else None
    return tail(node), tail(first) if counted else ""


def appends(loop: ast.For) -> list[ast.Call]:
    """Return the calls of `append()` in a loop, outside of loops in it."""
    return [
        n
        for n in inside(loop)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "append"
    ]


def by(index: ast.expr, count: str) -> bool:
    """Return whether an index is the count of a loop, or a slice that begins at a multiple of it."""
    first = index.lower if isinstance(index, ast.Slice) else index
    if isinstance(first, ast.BinOp) and isinstance(index, ast.Slice) and isinstance(first.op, ast.Mult):
        return count in (tail(first.left), tail(first.right))
    return tail(first) == count


def holds(value: ast.expr, names: set[str]) -> bool:
    """Return whether a value is one of these lists, or all of its parts joined."""
    if isinstance(value, ast.Call) and tail(value.func) in ("cat", "stack") and value.args:
        value = value.args[0]
    return isinstance(value, ast.Name) and value.id in names
