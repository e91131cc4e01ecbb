"""Generators of a script that yield batches (`def data_iter(x, y): ... yield x[i], y[i]`), and classes of its own that iterate over
batches (`__iter__`): to a rehearsal each is a DataLoader."""

import ast
import functools
import inspect
import linecache
import os
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from trainworthy.guard.hooks.batches import opened

NAMES = re.compile(r"(?i)batch|data|load|iter|gen|sampl|stream|feed|epoch|pairs")
PLAIN = {"staticmethod", "classmethod"}  # decorators that a generator of batches may have
# A line that takes an iterator itself calls next(), which does not expect an early end
CALLED = re.compile(r"\biter\(")
PLACES = (int, bool, float, type(None))  # types of an iterator's attributes that say how far it has come


class Generated(IterableDataset):
    """Stands for the data of a generator, in messages and checks: it is never read."""

    def __iter__(self) -> Iterator:
        return iter(())


class Streamed:
    """A generator or iterator whose batches pass through the observer; what it yields else is left as it is."""

    def __init__(self, source: Any, loader: DataLoader, seen: Any, may_end: Callable[[], bool]):
        self._source, self._loader, self._seen, self._may_end = source, loader, seen, may_end
        self._pass: Any = None
        self._plain = False
        self._counters = {k: v for k, v in getattr(source, "__dict__", {}).items() if type(v) in PLACES}

    def __iter__(self) -> "Streamed":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_source"], name)

    def __next__(self) -> Any:
        seen, one = self._seen, self._pass
        if self._plain:
            return next(self._source)
        if one is not None and self._may_end() and seen.cut(one):
            if isinstance(self._source, types.GeneratorType):
                self._source.close()
            if self._counters:  # the next pass begins at the beginning
                vars(self._source).update(self._counters)
            raise StopIteration
        drawn = seen.draws
        try:
            batch = next(self._source)
        except StopIteration:
            if one is not None and not one.was_cut:
                one.length = one.got
                seen.exhausted(one)
            raise
        if one is None:
            # a generator around another source, or one that a data set or an environment is behind
            self._plain = (
                seen.draws != drawn
                or seen.fetching
                or bool(getattr(seen.evidence.credit, "where", None))
                or not is_batch(opened(batch))
            )
            if self._plain:
                return batch
            one = self._pass = seen.new_pass(self._loader, self._source)
        leaves, spec = tree_flatten(batch)
        as_tensors = tree_unflatten([tensor_of(x) for x in leaves], spec)
        given = seen.batch(one, as_tensors)
        if given is as_tensors:
            return batch
        new = [x.numpy() if isinstance(old, np.ndarray) and isinstance(x, Tensor) else x
               for x, old in zip(tree_leaves(given), leaves, strict=True)]  # fmt: skip
        return tree_unflatten(new, spec)


def is_batch(what: Any) -> bool:
    """Return whether these are tensors or arrays with one row for each of several samples."""
    found = [x for x in tree_leaves(what) if isinstance(x, (Tensor, np.ndarray))]
    if not found or any(not x.ndim or (isinstance(x, Tensor) and x.requires_grad) for x in found):
        return False
    numbers = all(x.dtype.kind in "fiub" for x in found if isinstance(x, np.ndarray))
    return numbers and len({len(x) for x in found}) == 1 and len(found[0]) > 1 and any(x.ndim > 1 for x in found)


def tensor_of(x: Any) -> Any:
    """Return an array as a tensor on the same memory, anything else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    return torch.from_numpy(x if x.flags.writeable and all(s >= 0 for s in x.strides) else x.copy())


def generates(node: ast.FunctionDef) -> bool:
    """Return whether a function is a generator, by its own `yield`, that may yield batches."""
    todo: list[ast.AST] = list(node.body)
    names = {d.id if isinstance(d, ast.Name) else "" for d in node.decorator_list}
    while todo and NAMES.search(node.name) and names <= PLAIN and not node.name.startswith("__"):
        one = todo.pop()
        if isinstance(one, ast.Yield) and one.value is not None:
            return True
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo += ast.iter_child_nodes(one)
    return False


def iterations(tree: ast.AST) -> set[ast.FunctionDef]:
    """Return the methods `__iter__` of the file's classes: some classes iterate over batches without a DataLoader."""
    bodies = [n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and NAMES.search(n.name)]
    return {n for body in bodies for n in body if isinstance(n, ast.FunctionDef) and n.name == "__iter__"}


def looped(tree: ast.AST) -> set[str]:
    """Return the names of functions that `for` iterates over: these passes may end early, which `next()` would not expect."""
    loops = [n.iter for n in ast.walk(tree) if isinstance(n, (ast.For, ast.comprehension))]
    calls = [c for one in loops for c in ast.walk(one) if isinstance(c, ast.Call)]
    return {c.func.attr if isinstance(c.func, ast.Attribute) else getattr(c.func, "id", "") for c in calls}


def stream(function: Any, seen: Any, in_for: set[str]) -> Any:
    """Return a generator function, or a class's `__iter__`, whose batches are those of this rehearsal."""
    loader, home = DataLoader(Generated(), batch_size=None), os.getpid()

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        source = function(*args, **kwargs)
        if os.getpid() != home or get_worker_info() is not None:
            return source
        if function.__name__ == "__iter__":
            # an iterator of its own: `return self`, or a generator; built-in ones (`iter(self.rows)`) iterate over anything
            if not isinstance(source, types.GeneratorType) and source is not args[0]:
                return source
            may_end = not CALLED.search(line_of(inspect.currentframe()))
            return Streamed(source, loader, seen, lambda: may_end)
        if not isinstance(source, types.GeneratorType):
            return source
        return Streamed(source, loader, seen, lambda: function.__name__ in in_for)

    return wrapped


def line_of(frame: Any) -> str:
    """Return the line of code that called a function, by the function's frame."""
    return linecache.getline(frame.f_back.f_code.co_filename, frame.f_back.f_lineno).strip()
