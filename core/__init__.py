"""Trainworthy's core: launching, the loop's arithmetic, checkpoints, metrics, gates. It knows no domain.

Names are loaded on first use, so that `trainworthy list` and `--help` never import torch.
"""

from importlib import import_module

_EXPORTS = {
    "Config": "config", "Train": "config", "Optim": "config", "Phase": "config",
    "Data": "stage", "Expect": "stage", "Field": "stage", "Matrix": "stage", "Metric": "stage", "Points": "stage", "Probe": "stage",
    "Stage": "stage", "Tile": "stage",
    "GateFailed": "errors", "UserError": "errors", "TrainworthyWarning": "errors",
    "Ema": "ema",
    "Gate": "gates", "Verdict": "gates",
    "LRFinder": "lr_finder",
    "MetricsTracker": "metrics",
    "Run": "run", "Step": "run",
    "exclusions": "texts",
    "held_out": "validation_split",
    "program": "export", "save": "export",
    "fetch_member": "assets",
    "main": "launch",
    "make_optimizer": "optim",
    "Script": "script", "check": "script",
    "watch": "guard.watching",
}  # fmt: skip
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f"trainworthy.core.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'core' has no attribute '{name}'")


def __dir__():
    return __all__
