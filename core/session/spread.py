"""Derives the estimate of one of several processes: its memory with `--shard`, and the bytes that it sends.

These are calculated bounds for what core/loop/shard.py does, not measurements.
"""

from dataclasses import replace

from trainworthy.core.loop import shard
from trainworthy.core.session.estimate import Estimate

GATE_STEPS = 200
"""Training steps of a gate's batch that all gates of a stage compute, about (docs/scale.md has the measured numbers)."""


def cut(one: Estimate, processes: int, kind: str) -> Estimate:
    """Return the estimate of one of the processes that share a model by `--shard full` or `grad`; `one` is of whole models.

    Each process holds its part of parameters, EMA, gradients and moments, and all activations. At most, these are added:
    - Gathered parameters. `full`: those outside any unit, the unit that computes and the next one. `grad`: all.
    - Gradients that wait to be reduced: of the same parameters as in `full`; of all if a step has several micro-batches.
    In bf16, units are gathered in bf16, which replaces autocast's copies of the weights.
    """
    if processes == 1 or kind == shard.NONE:
        return one
    there = one.outside + (one.unit if one.halves else 2 * one.unit)
    gathered = there if kind == "full" else one.weights - one.halves
    waiting = one.gradients if one.micro_batches > 1 else there
    held = (one.weights + one.average + one.gradients + one.optimizer) // processes
    per_process = (one.weights + one.average + one.optimizer) // processes
    own = one.weights + one.average + one.optimizer + one.frozen
    evaluation = one.evaluation and max(0, one.evaluation - own - one.halves) + per_process + one.frozen + there
    parts = {k: getattr(one, k) // processes for k in ("weights", "average", "gradients", "optimizer")}
    training = held + one.frozen + max(0, one.computing - one.halves) + gathered + waiting
    return replace(one, **parts, training=training, evaluation=evaluation)


def exchanged(one: Estimate, processes: int, kind: str) -> float:
    """Return the bytes that each of n processes sends in an optimiser step, with ring algorithms; `one` is the estimate of whole models.

    DDP all-reduces the gradients: 2 (n - 1) / n of their bytes. Sharded runs gather the parameters for each micro-batch (`full`: before the
    forward and again before the backward pass) and reduce the gradients once: (n - 1) / n of their bytes each.
    """
    share, gradients = (processes - 1) / processes, 4 * one.trained
    if kind == shard.NONE:
        return 2 * share * gradients
    gathered = (one.weights - one.halves) * one.micro_batches * (2 if kind == "full" else 1)
    return share * (gathered + gradients)
