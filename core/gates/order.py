"""The gates that every recipe has, in the order they run."""

from trainworthy.core.gates.checks import data, export_weights, learning, loader, rates, rehearsal, stored_weights
from trainworthy.core.gates.checks.accumulation import accumulation
from trainworthy.core.gates.checks.batch_norm import batch_norm
from trainworthy.core.gates.checks.dependency import dependency
from trainworthy.core.gates.checks.entries import entries
from trainworthy.core.gates.checks.evaluation import evaluation
from trainworthy.core.gates.checks.exported import export_gate
from trainworthy.core.gates.checks.fabricated import fabricated
from trainworthy.core.gates.checks.init import init
from trainworthy.core.gates.checks.initial_loss import initial_loss
from trainworthy.core.gates.checks.leakage import leakage
from trainworthy.core.gates.checks.sharding import sharding
from trainworthy.core.gates.checks.tiny_data import tiny_data
from trainworthy.core.gates.gate import Gate
from trainworthy.core.recipe.stage import Stage

OF_DATA = [data.schema, data.inventory_gate, leakage, fabricated]
"""Gates that read the data and train nothing."""
OF_TRAINING = [
    initial_loss, init, rehearsal.wiring, batch_norm, rates.schedule, rates.terms, dependency, learning.overfit,
    learning.baseline, evaluation, accumulation, loader.reading, rates.range_test, tiny_data, rehearsal.resume,
]  # fmt: skip
ORDER = [*OF_DATA, *OF_TRAINING]
OWN = "own"
"""In `--only`: every gate that is not one of `ORDER`. A command that has not built the stages cannot name them."""


def chosen(found: list[Gate], only: tuple[str, ...]) -> list[Gate]:
    """Return the gates that `--only` names; all if it names none."""
    return [g for g in found if not only or g.id in only or (OWN in only and g not in ORDER)]


def of_stage(stage: Stage, *, sharded: bool = False) -> list[Gate]:
    """Return all gates of a stage: core's, those that only recipes have, the recipe's own, the one of sharded runs, and
    the export's if the recipe declares how it is loaded. A recipe's gate replaces one of core's with the same id."""
    own = {g.id for g in stage.gates}
    general = [stored_weights.storage, entries, *([stored_weights.ema] if stage.ema_model is not None else [])]
    if "train" not in stage.data and set(stage.data) - {"val", "test"}:
        general.append(loader.new_samples)
    if sharded:
        general.append(sharding)
    last = (
        [export_gate] if stage.exported else [export_weights.exported_weights] if export_weights.wanted(stage) else []
    )
    return [*ORDER, *(g for g in general if g.id not in own), *stage.gates, *last]
