"""Functions of the user's own, by the name that a setting gives them."""

import importlib
import importlib.util
from collections.abc import Callable

from trainworthy.core.base.errors import UserError


def imported(name: str, setting: str, needed: str) -> Callable:
    """Return the function that `module:function` or `file.py:function` names."""
    where, _, function = name.rpartition(":")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location("own_functions", where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        found = getattr(module, function)
    except (ImportError, AttributeError, ValueError, FileNotFoundError) as error:
        raise UserError(f"{setting} {name} cannot be found", got=f"{type(error).__name__}: {error}", needed=needed,
                        next="a file's own path (./file.py:function) needs no import path") from None  # fmt: skip
    except Exception as error:  # the user's code runs when it is imported
        raise UserError(f"{setting} {name}: its file raised while it was imported",
                        got=f"{type(error).__name__}: {error}") from error  # fmt: skip
    if not callable(found):
        raise UserError(f"{setting} {name} is not a function", got=type(found).__name__, needed=needed)
    return found
