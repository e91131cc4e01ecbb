"""What `make test` runs of cases that are alike, and what is left to `make verify`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sample(names: Iterable[Any], *keep: Any) -> list:
    """The names as cases; all but those in `keep` are marked `verify`. A tuple holds the values of several arguments."""
    names = list(names)
    assert {*keep} <= {*names}, f"no cases: {sorted({*keep} - {*names})}"
    return [
        n if n in keep else pytest.param(*(n if isinstance(n, tuple) else (n,)), marks=pytest.mark.verify)
        for n in names
    ]
