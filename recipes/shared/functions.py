"""Functions of the user's own, by the name that a setting gives them."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from trainworthy.core.base.errors import UserError


def imported(name: str, setting: str, needed: str) -> Callable:
    """Return the function that `module:function` or `file.py:function` names."""
    where, _, function = name.rpartition(":")
    module = _module(where, name, setting, needed)
    if not hasattr(module, function):
        own = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        close = difflib.get_close_matches(function, own, 1) or own[:1]
        raise UserError(f"{setting} {name} cannot be found", got=f"{where} has {', '.join(own) or 'no function'}", needed=needed,
                        next=f"{setting} {where}:{close[0]}" if close else "")  # fmt: skip
    found = getattr(module, function)
    if not callable(found):
        raise UserError(f"{setting} {name} is not a function", got=type(found).__name__, needed=needed)
    return found


def _module(where: str, name: str, setting: str, needed: str) -> ModuleType:
    """Import the user's file or module."""
    if where.endswith(".py") and not Path(where).is_file():
        raise UserError(f"{setting} {name} cannot be found", got=f"no file {Path(where).absolute()}", needed=needed)
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location("own_functions", where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except UserError:
        raise
    except Exception as error:  # the user's code runs when it is imported
        if (isinstance(error, ValueError) and not where) or (
            isinstance(error, ModuleNotFoundError) and _is_within(where, error.name)
        ):
            raise UserError(f"{setting} {name} cannot be found", got=f"{type(error).__name__}: {error}", needed=needed,
                            next="a file's own path (./file.py:function) needs no import path") from None  # fmt: skip
        raise UserError(f"{setting} {name}: its file raised while it was imported",
                        got=f"{type(error).__name__}: {error}") from error  # fmt: skip


def _is_within(where: str, missing: str | None) -> bool:
    """Is the missing module the one that was asked for, or a package around it? Else the user's own import failed."""
    return bool(missing) and f"{where}.".startswith(f"{missing}.")
