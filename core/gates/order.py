"""The gates that every recipe has, in the order they run."""

from trainworthy.core.gates import data, fabricated, init, learning, norms, rates, reading, rehearsal
from trainworthy.core.gates.exported import export_gate
from trainworthy.core.gates.gate import Gate
from trainworthy.core.recipe.stage import Stage

ORDER = [
    data.schema, data.inventory_gate, data.leakage, fabricated.fabricated, learning.initial_loss, init.init,
    rehearsal.wiring, norms.batch_norm, rates.schedule, rates.terms, learning.dependency, learning.overfit,
    learning.baseline, rehearsal.evaluation, rehearsal.accumulation, reading.reading, rates.range_test,
    learning.tiny_data, rehearsal.resume,
]  # fmt: skip


def of_stage(stage: Stage) -> list[Gate]:
    """Return all gates of a stage: core's, the recipe's own, and the export's if the recipe declares how it is
    loaded."""
    return [*ORDER, *stage.gates, *([export_gate] if stage.exported else [])]
