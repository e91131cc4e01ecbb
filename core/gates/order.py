"""The gates that every recipe has, in the order they run."""

from trainworthy.core.gates import data, fabricated, init, learning, norms, rates, reading, rehearsal

ORDER = [
    data.schema, data.inventory_gate, data.leakage, fabricated.fabricated, learning.initial_loss, init.init,
    rehearsal.wiring, norms.batch_norm, rates.schedule, rates.terms, learning.dependency, learning.overfit,
    learning.baseline, rehearsal.evaluation, rehearsal.accumulation, reading.reading, rates.range_test,
    learning.tiny_data, rehearsal.resume,
]  # fmt: skip
