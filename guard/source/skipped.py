"""Which lines of a function read a name, and whether a call executes one of them."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any


def reads(function: Any, name: str) -> set[int]:
    """Return the lines, in its file, on which a function reads a name; none if its source is not known."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        n.lineno + first - 1
        for n in ast.walk(tree)
        if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
    }


def skipped(function: Any, name: str, call: Callable[[], Any]) -> bool:
    """Return whether a function reads a name only on lines that `call` does not execute: a setting decides about them."""
    due = reads(function, name)
    code, done = getattr(inspect.unwrap(function), "__code__", None), set()
    if not due or code is None:
        return False

    def line(frame: Any, event: str, _arg: Any) -> Any:
        done.add(frame.f_lineno)
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: line if frame.f_code is code else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return bool(done) and not due & done
