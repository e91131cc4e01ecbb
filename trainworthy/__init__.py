"""The public names, for people's own scripts: `from trainworthy import MetricsTracker, LRFinder`."""

from trainworthy import core as _core

__all__ = _core.__all__


def __getattr__(name: str):
    return getattr(_core, name)


def __dir__():
    return __all__
