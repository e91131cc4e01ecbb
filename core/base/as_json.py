"""`--json`: prints the results of a command to stdout, and everything else to stderr."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def results(enabled: bool, *, speaks: bool = True) -> Iterator[dict[str, Any]]:
    """Redirect everything that is printed inside to stderr. Print the yielded dictionary, which the command fills, to stdout at the end, also
    if the command raises or exits (a failed gate). An empty dictionary is not printed: a wrong setting has no results.

    Args:
        enabled: whether `--json` was given; without it nothing changes.
        speaks: False on other ranks, which print no results.
    """
    found: dict[str, Any] = {}
    if not enabled:
        yield found
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield found
    finally:
        if found and speaks:
            write(found)


def write(found: Any) -> None:
    """Print it as JSON that every reader takes: Python's own has NaN and Infinity, which other readers refuse."""
    print(json.dumps(finite(found), indent=1, default=str, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """Return the value as JSON has it: infinities, NaN and paths become words."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    unwritable = isinstance(value, float) and not math.isfinite(value)  # JSON has no infinity
    return str(value) if unwritable or isinstance(value, Path) else value
