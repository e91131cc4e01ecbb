"""Type checkers and editors see the public names with their types."""

import ast
import importlib

from tests.conftest import ROOT
from trainworthy import core


def declared() -> dict[str, str]:
    """Public name -> its module, as type checkers read them in core/__init__.py."""
    tree = ast.parse((ROOT / "core" / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, f"{alias.name}: `X as X`, else strict checkers take it for private"
            found[alias.name] = node.module or ""
    return found


def test_type_checkers_see_the_names_that_python_loads():
    assert declared() == core._HOME
    for name, module in declared().items():
        assert getattr(importlib.import_module(module), name) is getattr(core, name)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "trainworthy" / "py.typed").is_file()
