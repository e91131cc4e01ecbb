"""Trainworthy's core: launching, the loop's arithmetic, checkpoints, metrics, gates. It knows no domain.

Names are loaded on first use, so that `trainworthy list` and `--help` never import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ == "core":  # `python -m core.launch` in a checkout
    from trainworthy import checkout

    checkout.alias(__name__)

# fmt: off
# isort: off
if TYPE_CHECKING:  # the same names, for type checkers and editors; tests/core/test_types.py compares both
    from trainworthy.core.base.config import Config as Config, Loader as Loader, Optim as Optim, Phase as Phase, Train as Train
    from trainworthy.core.base.errors import GateFailed as GateFailed, UserError as UserError
    from trainworthy.core.base.verdict import Finding as Finding, Skip as Skip, Verdict as Verdict
    from trainworthy.core.data.assets import fetch_member as fetch_member
    from trainworthy.core.data.texts import load_exclusions as load_exclusions
    from trainworthy.core.data.validation_split import parse_val as parse_val
    from trainworthy.core.gates.gate import Gate as Gate, GateContext as GateContext, gate as gate
    from trainworthy.core.launch import main as main
    from trainworthy.core.loop.ema import Ema as Ema
    from trainworthy.core.loop.export import export_program as export_program, save_export as save_export
    from trainworthy.core.loop.lr_finder import LRFinder as LRFinder
    from trainworthy.core.loop.optim import make_optimizer as make_optimizer
    from trainworthy.core.loop.run import Run as Run, Step as Step
    from trainworthy.core.monitoring.metrics import MetricsTracker as MetricsTracker
    from trainworthy.core.recipe.figures import Matrix as Matrix, Points as Points, Tile as Tile
    from trainworthy.core.recipe.stage import (
        Data as Data, Expect as Expect, Field as Field, Metric as Metric, Probe as Probe, Stage as Stage, View as View)
    from trainworthy.guard.adapters.loop import Loop as Loop
    from trainworthy.guard.adapters.script import Script as Script, check as check
    from trainworthy.guard.watching import watch as watch
# isort: on
# fmt: on

_EXPORTS = {
    "base.config": ("Config", "Loader", "Optim", "Phase", "Train"),
    "base.errors": ("GateFailed", "UserError"),
    "base.verdict": ("Finding", "Skip", "Verdict"),
    "recipe.figures": ("Matrix", "Points", "Tile"),
    "recipe.stage": ("Data", "Expect", "Field", "Metric", "Probe", "Stage", "View"),
    "data.texts": ("load_exclusions",),
    "data.assets": ("fetch_member",),
    "data.validation_split": ("parse_val",),
    "monitoring.metrics": ("MetricsTracker",),
    "loop.run": ("Run", "Step"),
    "loop.optim": ("make_optimizer",),
    "loop.ema": ("Ema",),
    "loop.lr_finder": ("LRFinder",),
    "loop.export": ("export_program", "save_export"),
    "gates.gate": ("Gate", "GateContext", "gate"),
    "launch": ("main",),
}  # fmt: skip
_OF_GUARD = {"adapters.loop": ("Loop",), "adapters.script": ("Script", "check"), "watching": ("watch",)}
_HOME = {
    name: f"trainworthy.{package}.{module}"
    for package, exports in (("core", _EXPORTS), ("guard", _OF_GUARD))
    for module, names in exports.items()
    for name in names
}
if not TYPE_CHECKING:  # type checkers cannot compute it, and would take it for empty
    __all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'trainworthy.core' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(_HOME)
