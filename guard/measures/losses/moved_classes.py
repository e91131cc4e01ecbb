"""Finds classes of a one-hot map that a view puts on the second axis: `one_hot(mask).view(N, C, H, W)`, where `permute` is meant."""

import ast
import functools
import itertools
import linecache
from types import CodeType
from typing import Any

from torch import Tensor
from trainworthy.core.base.verdict import Fault

LEAST = 4  # calls


class MovedClasses:
    """The calls of `one_hot` on maps, and the views that directly follow them."""

    def __init__(self) -> None:
        self.calls = self.moved = 0
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.line = 0

    def note(self, out: Tensor, frame: Any) -> None:
        """Note one call; `frame`: its caller's."""
        if self.calls >= 8 * LEAST or out.dim() < 3 or out.shape[-1] < 2:
            return
        self.calls += 1
        view = following(frame.f_code, frame.f_lasti)
        shape = requested(view, {**frame.f_globals, **frame.f_locals}) if view is not None else ()
        old = tuple(out.shape)
        if len(shape) == len(old) and shape != old and shape[1] == old[-1] and 1 not in (old[-2], old[-1]):
            self.moved, self.shapes, self.line = self.moved + 1, (old, tuple(shape)), frame.f_lineno

    def fault(self) -> Fault | None:
        """Return what is wrong, and the cause."""
        if self.moved < LEAST:
            return None
        old, new = self.shapes
        return (
            f"line {self.line}: one_hot() returns {old}, with the classes on the last axis, and a view of it has the shape {new}",
            "view() or reshape() does not move the classes to the second axis: permute(0, 3, 1, 2) or movedim(-1, 1)",
        )


@functools.lru_cache(256)
def following(code: CodeType, instruction: int) -> ast.Call | None:
    """Return the call of view() or reshape() of the result of the call that an instruction makes."""
    place = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    for node in ast.walk(tree(code.co_filename)):
        match node:
            case ast.Call(ast.Attribute(ast.Call() as inner, "view" | "reshape" | "view_as" | "reshape_as")):
                if (inner.lineno, inner.end_lineno, inner.col_offset, inner.end_col_offset) == place:
                    return node
    return None


@functools.lru_cache(8)
def tree(name: str) -> ast.Module:
    """Return the source of a file; nothing if it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def requested(view: ast.Call, known: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape that a view asks for, as far as it is that of a variable or is written out in variables; else nothing."""
    args = [a.value if isinstance(a, ast.Starred) else a for a in view.args]
    if view.func.attr.endswith("_as") and args:  # type: ignore[attr-defined]
        return shape_of(args[0], known)
    if len(args) == 1:
        one = args[0]
        if isinstance(one, (ast.Tuple, ast.List)):
            args = one.elts
        else:
            call = one.func if isinstance(one, ast.Call) and not one.args else one
            of = isinstance(call, ast.Attribute) and call.attr in ("shape", "size")
            return shape_of(call.value, known) if of else ()  # type: ignore[union-attr]
    found = [a.value if isinstance(a, ast.Constant) else known.get(getattr(a, "id", "")) for a in args]
    return tuple(n if isinstance(n, int) else -1 for n in found)


def shape_of(node: ast.AST, known: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a variable; nothing if it is no tensor."""
    value = known.get(getattr(node, "id", ""))
    return tuple(value.shape) if isinstance(value, Tensor) else ()
