"""Finds results that were kept in the order of one pass over a loader and are read by the number of a batch of another, shuffled pass."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.calls import is_call, methods, owner, trains
from trainworthy.guard.source.nodes import FUNCTIONS, inside, parameters, tail
from trainworthy.guard.source.reading import Source

WRAPPERS = ("enumerate", "tqdm", "track")
ORDERED = ("sampler", "batch_sampler", "generator")
"""Arguments of a loader whose order may repeat."""


def reread(source: Source) -> Fault | None:
    """Find a training loop over a shuffled loader that reads kept results by its own count."""
    caches = Caches(source)
    loaders, kept = set(caches.shuffled()), caches.kept()
    for file, scope in source.scopes if loaders and kept else ():
        for loop in (n for n in inside(scope) if isinstance(n, ast.For) and trains(n)):
            name, count = looped(loop)
            if not count or caches.known_as(scope, name) not in loaders:
                continue
            for node in ast.walk(loop):
                match node:
                    case ast.Subscript(value=value, slice=index, ctx=ast.Load()) if by(index, count):
                        cache = caches.known_as(scope, tail(value))
                        if cache in kept and kept[cache] is not loop:
                            return (
                                f"line {node.lineno} of {file} reads `{ast.unparse(node)}` in a loop over `{name}`, which is shuffled, and "
                                f"`{cache}` has the order of the loop in line {kept[cache].lineno}",
                                "each pass over a shuffled loader has another order: keep the results by the index of their sample, in the data set",
                            )
    return None


class Caches:
    """The loaders and the kept results of a script, under the names that its calls pass."""

    def __init__(self, source: Source):
        self.source = source
        self.bound: dict[tuple[int, str], set[str]] = {}  # function and parameter -> names that calls pass
        self.reached: dict[int, int] = {}  # call -> function
        for _, call, function, names in source.calls.reached:
            self.reached[id(call)] = id(function)
            given = dict(zip(names, map(tail, call.args), strict=False))
            given |= {k.arg or "": tail(k.value) for k in call.keywords}
            for name in parameters(function, bound=False):
                self.bound.setdefault((id(function), name), set()).add(given.get(name, ""))

    def known_as(self, scope: ast.AST, name: str) -> str:
        """Return the name that every call of a function passes for its parameter; of any other variable its own name."""
        given = self.bound.get((id(scope), name))
        return name if given is None else next(iter(given)) if len(given) == 1 else ""

    def shuffled(self) -> Iterator[str]:
        """Yield the names that are always a loader with shuffle=True, of no sampler and no generator of its own."""
        made: dict[str, list[bool]] = {}
        for target, value in self._pairs():
            keys = {k.arg: ast.unparse(k.value) for k in value.keywords} if is_call(value, "DataLoader") else {}
            made.setdefault(target, []).append(keys.get("shuffle") == "True" and not keys.keys() & set(ORDERED))
        return (name for name, rows in made.items() if name and all(rows))

    def kept(self) -> dict[str, ast.For]:
        """Return the lists that a loop over a loader fills, also inside of a function that returns them, with the loop."""
        found: dict[str, ast.For] = {}
        filled: dict[int, ast.For] = {}  # function -> the loop that fills what it returns
        for _, scope in self.source.scopes:
            for loop in (n for n in inside(scope) if isinstance(n, ast.For) and not trains(n)):
                lists = {owner(c) for c in methods(inside(loop), "append")}
                loads = [looped(loop)[0], self.known_as(scope, looped(loop)[0])]
                if not lists or not any("loader" in n.lower() or n.lower().endswith("dl") for n in loads):
                    continue
                found |= dict.fromkeys(lists - {""}, loop)
                back = [n.value for n in inside(scope) if isinstance(n, ast.Return) and n.value is not None]
                if isinstance(scope, FUNCTIONS) and len(back) == 1 and len(lists) == 1 and holds(back[0], lists):
                    filled[id(scope)] = loop
        for target, value in self._pairs():
            if target and (function := self.reached.get(id(value))) in filled:
                found[target] = filled[function]
            elif target and is_call(value, "cat", "stack") and value.args and (loop := found.get(tail(value.args[0]))):
                found[target] = loop
        return found

    def _pairs(self) -> Iterator[tuple[str, ast.expr]]:
        """Yield the names that assignments give values, with these."""
        for _, node in self.source.of(ast.Assign):
            match node.targets[0], node.value:
                case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(values) == len(names):
                    yield from zip(map(tail, names), values, strict=True)
                case ast.Tuple(elts=names), _:
                    yield from ((tail(t), ast.Constant(0)) for t in names)
                case target, value:
                    yield tail(target), value


def looped(loop: ast.For) -> tuple[str, str]:
    """Return the name of what a loop runs over, and that of its count; empty without `enumerate`."""
    node, counted = loop.iter, False
    while is_call(node, *WRAPPERS) and node.args:
        counted |= tail(node.func) == "enumerate"
        node = node.args[0]
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else None
    return tail(node), tail(first) if counted else ""


def by(index: ast.expr, count: str) -> bool:
    """Return whether an index is the count of a loop, or a slice that begins at a multiple of it."""
    match index:
        case ast.Slice(lower=ast.BinOp(left=left, op=ast.Mult(), right=right)):
            return count in (tail(left), tail(right))
        case ast.Slice(lower=start):
            return tail(start) == count
    return tail(index) == count


def holds(value: ast.expr, names: set[str]) -> bool:
    """Return whether a value is one of these lists, or all of its parts joined."""
    if is_call(value, "cat", "stack") and value.args:
        value = value.args[0]
    return isinstance(value, ast.Name) and value.id in names
