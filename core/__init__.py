"""Trainworthy's core: launching, the loop's arithmetic, checkpoints, metrics, gates. It knows no domain.

Names are loaded on first use, so that `trainworthy list` and `--help` never import torch.
"""

from importlib import import_module

if __name__ == "core":  # `python -m core.launch` in a checkout
    from trainworthy import checkout

    checkout.alias(__name__)

_EXPORTS = {
    "base.config": ("Config", "Loader", "Optim", "Phase", "Train"),
    "base.errors": ("GateFailed", "UserError", "TrainworthyWarning"),
    "base.verdict": ("Finding", "Skip", "Verdict"),
    "recipe.stage": ("Data", "Expect", "Field", "Matrix", "Metric", "Points", "Probe", "Stage", "Tile", "View"),
    "data.texts": ("exclusions",),
    "data.assets": ("fetch_member",),
    "data.validation_split": ("held_out",),
    "monitoring.metrics": ("MetricsTracker",),
    "loop.run": ("Run", "Step"),
    "loop.optim": ("make_optimizer",),
    "loop.ema": ("Ema",),
    "loop.lr_finder": ("LRFinder",),
    "loop.export": ("program", "save"),
    "gates.gate": ("Gate", "gate"),
    "adapters.script": ("Script", "check"),
    "guard.watching": ("watch",),
    "launch": ("main",),
}  # fmt: skip
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"trainworthy.core.{_HOME[name]}"), name)
    raise AttributeError(f"module 'trainworthy.core' has no attribute '{name}'")


def __dir__():
    return __all__
