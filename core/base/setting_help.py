"""Help texts of settings for tyro, which would keep the line breaks of their docstrings in the source."""

import ast
import dataclasses
import inspect
import textwrap
import typing
from itertools import pairwise
from typing import Annotated, Any

import tyro


def join_lines(cls: Any) -> None:
    """Make each docstring of the dataclass `cls`, and of its groups of settings, one paragraph."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), documented(cls)
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            join_lines(hints[f.name])
        elif f.name in texts:
            cls.__annotations__[f.name] = Annotated[hints[f.name], tyro.conf.arg(help=texts[f.name])]


def documented(cls: type) -> dict[str, str]:
    """Return {field: its docstring in one line} of a dataclass and its bases."""
    found = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, text in pairwise(node.body if isinstance(node, ast.ClassDef) else []):
                match field, text:
                    case ast.AnnAssign(target), ast.Expr(ast.Constant(value)):
                        found[ast.unparse(target)] = " ".join(str(value).split())
    return found
