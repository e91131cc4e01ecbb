"""Keeps an observer's own errors from the script, and observation away from code that is recorded and not run."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from trainworthy.core.base.errors import Stop
from trainworthy.guard.hooks.patches import replace

# Events whose result the script gets: index of the argument that replaces it after an error
GIVES_BACK = {"batch": 1, "answer": 3}
NEEDED = ("new_pass",)  # without its result nothing can be observed
RECORDERS = ((torch.jit, "trace"), (torch.jit, "trace_module"), (torch.onnx, "export"), (torch.export, "export"))


class Shield:
    """Passes events on to an observer. An error in one of them is noted, and the script goes on: a kind of tensor that the
    observer does not know (sparse, nested, of a subclass) is no fault of the script."""

    def __init__(self, seen: Any):
        vars(self)["seen"] = seen

    def __getattr__(self, name: str) -> Any:
        seen = vars(self)["seen"]
        value = getattr(seen, name)
        if not hasattr(type(seen), name) or not callable(value) or name in NEEDED:
            return value
        vars(self)[name] = kept = shielded(seen, value, name)
        return kept

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["seen"], name, value)


def shielded(seen: Any, method: Callable, name: str) -> Callable:
    """Return the method without its errors. Those that are meant to end the script get through."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        busy = seen.busy
        try:
            return method(*args, **kwargs)
        except Stop:
            raise
        except Exception as error:
            seen.busy = busy
            message = " ".join(str(error).split())[:120]
            note = f"the observer failed and goes on ({name}: {type(error).__name__}: {message})"
            if note not in seen.notes:
                seen.notes.append(note)
            return args[GIVES_BACK[name]] if name in GIVES_BACK and len(args) > GIVES_BACK[name] else None

    return run


def recorders(seen: Any) -> None:
    """Observe nothing while torch records a model's graph (`SummaryWriter.add_graph`, an export): what the observer computed
    would become a part of the graph, and the made-up inputs are no training data."""

    def unseen(original: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            before, seen.busy = seen.busy, True
            try:
                return original(*args, **kwargs)
            finally:
                seen.busy = before

        return run

    for owner, name in RECORDERS:
        replace(owner, name, unseen)
