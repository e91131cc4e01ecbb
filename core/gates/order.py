"""The gates that every recipe has, in the order they run."""

from trainworthy.core.gates import (
    accumulation,
    data,
    entries,
    evaluation,
    export_weights,
    fabricated,
    init,
    kept,
    learning,
    norms,
    rates,
    reading,
    rehearsal,
)
from trainworthy.core.gates.exported import export_gate
from trainworthy.core.gates.gate import Gate
from trainworthy.core.gates.sharding import sharding
from trainworthy.core.recipe.stage import Stage

ORDER = [
    data.schema, data.inventory_gate, data.leakage, fabricated.fabricated, learning.initial_loss, init.init,
    rehearsal.wiring, norms.batch_norm, rates.schedule, rates.terms, learning.dependency, learning.overfit,
    learning.baseline, evaluation.evaluation, accumulation.accumulation, reading.reading, rates.range_test,
    learning.tiny_data, rehearsal.resume,
]  # fmt: skip


def of_stage(stage: Stage, *, sharded: bool = False) -> list[Gate]:
    """Return all gates of a stage: core's, those that only recipes have, the recipe's own, the one of sharded runs, and
    the export's if the recipe declares how it is loaded. A recipe's gate replaces one of core's with the same id."""
    own = {g.id for g in stage.gates}
    general = [kept.storage, entries.entries, *([kept.average] if stage.ema_model is not None else [])]
    if "train" not in stage.data and set(stage.data) - {"val", "test"}:
        general.append(reading.walk)
    if sharded:
        general.append(sharding)
    last = (
        [export_gate] if stage.exported else [export_weights.exported_weights] if export_weights.wanted(stage) else []
    )
    return [*ORDER, *(g for g in general if g.id not in own), *stage.gates, *last]
