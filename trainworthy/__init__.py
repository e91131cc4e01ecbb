"""The public names, for people's own scripts: `from trainworthy import MetricsTracker, LRFinder`.

An installation adds only this package; `trainworthy.core`, `trainworthy.guard` and `trainworthy.recipes` are inside it. In a checkout
they are the folders `core/`, `guard/` and `recipes/` next to this one.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (Path(__file__).parent / "core").is_dir():
    __path__.append(str(Path(__file__).resolve().parent.parent))

from trainworthy import core as _core

if TYPE_CHECKING:
    from trainworthy.core import *  # noqa: F403
else:
    __all__ = _core.__all__


def __getattr__(name: str) -> Any:
    return getattr(_core, name)


def __dir__() -> list[str]:
    return dir(_core)
