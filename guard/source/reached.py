"""The calls of a script's own functions and classes, with the function that each of them reaches."""

import ast
from collections.abc import Iterator

from trainworthy.guard.source.calls import unwrapped
from trainworthy.guard.source.nodes import FUNCTIONS, Function, parameters, tail


class Calls:
    """The functions and classes of some syntax trees, and the calls that reach them."""

    def __init__(self, trees: dict[str, ast.Module], nodes: list[tuple[str, ast.AST]]):
        self.functions: list[Function] = []
        self.by_name: dict[str, list[Function]] = {}  # functions that are no methods
        self.classes: dict[str, list[ast.ClassDef]] = {}
        self.owner: dict[int, ast.ClassDef] = {}  # method -> its class
        self.within: dict[int, tuple[Function, ...]] = {}  # node -> functions around it
        self.made: dict[str, list[str]] = {}  # variable -> names of what it is assigned a call of; "" for anything else
        for tree in trees.values():
            self._collect(tree, ())
        self.reached = list(self._reached(nodes))

    def _collect(self, node: ast.AST, around: tuple[Function, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            self.within[id(child)] = around
            match child:
                case ast.ClassDef(name=name):
                    self.classes.setdefault(name, []).append(child)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions.append(child)
                    if isinstance(node, ast.ClassDef):
                        self.owner[id(child)] = node
                    else:
                        self.by_name.setdefault(child.name, []).append(child)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        several = isinstance(target, (ast.Tuple, ast.List))
                        for one in target.elts if several else [target]:
                            self.made.setdefault(tail(one), []).append("" if several else constructed(value))
            self._collect(child, (*around, child) if isinstance(child, FUNCTIONS) else around)

    def _reached(self, nodes: list[tuple[str, ast.AST]]) -> Iterator[tuple[str, ast.Call, Function, list[str]]]:
        """Yield (file, call, function, names of the parameters that positional arguments get)."""
        for file, node in nodes:
            if isinstance(node, ast.Call) and (found := self._function(node)) is not None:
                bound = id(found) in self.owner and not any(tail(d) == "staticmethod" for d in found.decorator_list)
                if found not in self.within[id(node)]:
                    yield file, node, found, parameters(found, bound)

    def _function(self, call: ast.Call) -> Function | None:
        """Return the one function of the script that a call reaches; None if that is not certain."""
        match call.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                around = [self.owner[id(f)] for f in self.within[id(call)] if id(f) in self.owner]
                if around and (found := method(around[-1], name)) is not None:
                    return found
        name = tail(call.func)
        made = set(self.made.get(name, ()))
        if len(made) == 1 and (kind := next(iter(made))) in self.classes and name not in self.by_name:
            return self._of_class(kind, "forward", "__call__")
        if made or isinstance(call.func, ast.Attribute):
            return None
        if len(self.by_name.get(name, ())) == 1 and name not in self.classes:
            return self.by_name[name][0]
        return self._of_class(name, "__init__") if name not in self.by_name else None

    def _of_class(self, kind: str, *names: str) -> Function | None:
        found = self.classes.get(kind, ())
        return next((m for n in names if (m := method(found[0], n)) is not None), None) if len(found) == 1 else None


def method(home: ast.ClassDef, name: str) -> Function | None:
    """Return a class's own method; None if it has several of that name (properties, overloads)."""
    found = [n for n in home.body if isinstance(n, FUNCTIONS) and n.name == name]
    return found[0] if len(found) == 1 else None


def constructed(value: ast.AST) -> str:
    """Return the name that is called in `Name(...)` or `Name(...).to(device)`; empty for anything else."""
    match unwrapped(value, "to", "cuda", "train", "eval"):
        case ast.Call(func=ast.Name(id=name)):
            return name
    return ""
