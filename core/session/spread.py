"""What an estimate becomes when the training is spread over processes: memory of each with `--shard`, and the bytes that they exchange.

Not measured on a device: bounds by calculation, from what core/loop/shard.py does.
"""

from dataclasses import replace

from trainworthy.core.loop import shard
from trainworthy.core.session.estimate import Estimate

GATE_STEPS = 200
"""Training steps of a gate's batch that all gates of a stage compute, about (docs/scale.md has the measured numbers)."""


def cut(one: Estimate, processes: int, kind: str) -> Estimate:
    """Return the estimate of one of the processes that share a model by `--shard full` or `grad`; `one` is of whole models.

    Each process holds a part of parameters, EMA, gradients and moments. Added, at most: the parameters that are gathered (of `full` two
    units, one computes and one arrives, and what is in no unit; of `grad` all) and the gradients that wait to be reduced (as
    many; all if a step has several micro-batches). Activations stay, at their peak. In bf16 units are gathered in bf16, in place of the copies of
    the weights that autocast makes.
    """
    if processes == 1 or kind == shard.NONE:
        return one
    there = one.outside + (one.unit if one.halves else 2 * one.unit)
    gathered = there if kind == "full" else one.weights - one.halves
    waiting = one.gradients if one.micro_batches > 1 else there
    held = (one.weights + one.average + one.gradients + one.optimizer) // processes
    still = (one.weights + one.average + one.optimizer) // processes
    own = one.weights + one.average + one.optimizer + one.frozen
    evaluation = one.evaluation and max(0, one.evaluation - own - one.halves) + still + one.frozen + there
    return replace(
        one,
        weights=one.weights // processes,
        average=one.average // processes,
        gradients=one.gradients // processes,
        optimizer=one.optimizer // processes,
        training=held + one.frozen + max(0, one.computing - one.halves) + gathered + waiting,
        evaluation=evaluation,
    )


def exchanged(one: Estimate, processes: int, kind: str) -> float:
    """Bytes that each process sends in an optimiser step, by ring algorithms; `one` is the estimate of whole models.

    DDP reduces the gradients to all: 2 (n - 1) / n of them. Sharded: the parameters are gathered for each micro-batch (of `full` before the
    forward and before the backward pass), and the gradients reduced once, (n - 1) / n of either.
    """
    share, gradients = (processes - 1) / processes, 4 * one.trained
    if kind == shard.NONE:
        return 2 * share * gradients
    gathered = (one.weights - one.halves) * one.micro_batches * (2 if kind == "full" else 1)
    return share * (gathered + gradients)
