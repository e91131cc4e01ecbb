"""Functions in place of others, until they are put back."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

rehearsal: Callable[[str], None] | None = None
"""Set in a process in which `guard` rehearses a script: takes a note of what is left out there."""

watched_script: Callable[[str], None] | None = None
"""Set while `trainworthy watch` runs a whole script: takes a note of what is left out there."""

_undo: list[Callable[[], None]] = []
_redo: list[Callable[[], None]] = []
_made: list[tuple[Any, str, Any, Any]] = []  # owner, name, function before, function now


def change(do: Callable[[], None], undo: Callable[[], None]) -> None:
    """Call `do`, until `remove` calls `undo`."""
    do()
    _redo.append(do)
    _undo.append(undo)


def replace(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Put `make(original)` in place of `owner.name`, until `remove`."""
    own = name in vars(owner)
    original = getattr(owner, name)
    wrapped = make(original)
    functools.update_wrapper(wrapped, original)
    if isinstance(owner, ModuleType):  # a model that holds torch.sigmoid is pickled whole
        wrapped.__module__, wrapped.__qualname__ = owner.__name__, name
    change(
        lambda: setattr(owner, name, wrapped),
        lambda: setattr(owner, name, original) if own else delattr(owner, name),
    )
    _made.append((owner, name, original, wrapped))


def before(owner: Any, name: str, report: Callable) -> None:
    """Call `report` with the arguments of `owner.name` before each of its calls, until `remove`."""

    def reporting(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            report(*args, **kwargs)
            return original(*args, **kwargs)

        return run

    replace(owner, name, reporting)


def after(owner: Any, name: str, report: Callable) -> None:
    """Call `report` with the result and the arguments of `owner.name` after each of its calls, until `remove`."""

    def reporting(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            report(out, *args, **kwargs)
            return out

        return run

    replace(owner, name, reporting)


def undo_with(*steps: Callable[[], None]) -> None:
    """Let `remove` call these, too."""
    _undo.extend(steps)


def installed() -> bool:
    """Return whether functions are replaced now."""
    return bool(_undo)


def remove() -> None:
    """Undo all patches."""
    while _undo:
        _undo.pop()()
    _redo.clear()
    _made.clear()


@contextmanager
def suspended() -> Iterator[None]:
    """Undo all patches inside the block. What runs in it is not observed, and may be observed by others."""
    undo, redo, made = [*_undo], [*_redo], [*_made]
    remove()
    try:
        yield
    finally:
        remove()
        for again in redo:
            again()
        _undo[:], _redo[:], _made[:] = undo, redo, made
        if undo:
            imported_by_name()  # by modules that were first imported inside the block


def imported_by_name() -> None:
    """Modules that have imported a function by its name (`from torch.nn.functional import cross_entropy`) before it was
    replaced get the new one, too."""
    new = {id(old): (old, wrapped) for owner, _, old, wrapped in _made if not isinstance(owner, type)}
    for module in list(sys.modules.values()):
        if str(getattr(module, "__name__", "torch")).partition(".")[0] == "torch" or not hasattr(module, "__dict__"):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new and new[id(value)][0] is value:
                change(
                    functools.partial(setattr, module, name, new[id(value)][1]),
                    functools.partial(setattr, module, name, value),
                )
