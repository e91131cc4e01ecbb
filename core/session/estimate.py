"""Estimates what a stage needs, without its weights: memory by kind, floating-point operations, bytes of a checkpoint.

The recipe's own factory builds the stage with fake parameters, which have a shape and no values. Its own `train()` then
makes two optimiser steps on them, and every storage counts from the operation that makes it until it is freed. What a
program reads from a fake tensor is 1 (a number), true (a condition) or zeros (an array).
"""

import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from trainworthy.core.base.errors import Stop
from trainworthy.core.loop import shard
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.loading import Recipe
from trainworthy.core.recipe.stage import Data, Stage, View
from trainworthy.core.session import stages, token_rows
from trainworthy.core.session.simulation import LONGEST, Simulation, TooLong, simulated

STEPS = 2  # the second one finds the optimiser's state
LONGEST_EVALUATION = 30.0  # processor seconds of its simulation


@dataclass
class Estimate:
    """What one stage needs on one process; bytes, unless another unit is named."""

    stage: str
    parameters: int
    """Numbers, in the model."""
    trained: int
    """Numbers, in its optimisers."""
    weights: int
    """Of the model, with its buffers."""
    average: int
    """Of the EMA."""
    frozen: int
    """Of teacher, reference and other modules outside the model."""
    gradients: int
    optimizer: int
    micro_batch: int
    """Samples."""
    micro_batches: int
    """Of an optimiser step, on each process."""
    training: int
    """Peak of an optimiser step, with all of the above."""
    computing: int
    """Peak of what is neither weights, EMA, frozen modules, gradients nor optimiser's state: more than `activations` where a backward
    pass frees fewer bytes of activations than it makes of gradients, so that `training` has its peak at its end."""
    largest: tuple[tuple[int, ...], str, int]
    """Shape, type and bytes of the largest tensor that the steps make."""
    flops: float
    """Floating-point operations of an optimiser step of all processes, in products and convolutions."""
    steps: int | None
    """Optimiser steps of the whole stage; None: the number of its samples is not known."""
    checkpoint: int
    best: int
    """Weights of one kept evaluation."""
    evaluation: int | None = None
    """Peak of an evaluation of one batch; None: it cannot be simulated."""
    cache: int = 0
    """Keys and values of a generation in the evaluation."""
    tokens: int = 0
    """Positions of a sample that the model reads, where samples are rows of tokens (`input_ids`)."""
    gate_batch: int = 0
    """Largest batch of a gate, in samples."""
    unit: int = 0
    """Parameters of the largest unit that `--shard` gathers at once; 0: the recipe names none."""
    outside: int = 0
    """Parameters in no such unit: embeddings, head."""
    halves: int = 0
    """Bytes that the units' fp32 weights lose where `--shard` gathers them in bf16; then autocast makes no copies of them."""
    missing: list[str] = field(default_factory=list)
    """What could not be simulated, and why."""

    @property
    def activations(self) -> int:
        """What is left of the peak: activations, and what operations need for a moment."""
        held = self.weights + self.average + self.frozen + self.gradients + self.optimizer
        return max(0, self.training - held)


# ------------------------------------------------------------------------------------------------------------- estimates
def estimates(
    recipe: Recipe, cfg: Any, *, processes: int = 1, longest: bool = False, samples: int | None = None
) -> list[Estimate]:
    """Estimate every stage of a recipe, in order. `longest`: the data are placeholders, so every text gets the largest
    length that the settings allow; `samples`: size of the real training set."""
    accelerator, found = Accelerator(cpu=True), []
    with simulated() as memory:
        previous = None
        for spec in stages.specs(recipe, cfg):
            previous, one = _estimate(recipe, spec, previous, memory, accelerator, processes, longest, samples)
            found.append(one)
    return found


def _estimate(
    recipe: Recipe,
    spec: stages.StageSpec,
    previous: Stage | None,
    memory: Simulation,
    accelerator: Accelerator,
    processes: int,
    longest: bool,
    samples: int | None,
) -> tuple[Stage, Estimate]:
    t, missing = spec.cfg.train, []
    micro = max(1, -(-t.batch_size // (processes * t.accumulate)))
    pieces = min(2, t.accumulate)  # the second one finds the first one's gradients
    plan = Rehearsal(steps=STEPS, batch_size=pieces * micro, sizes=[micro] * pieces)
    run = Run(spec.cfg, accelerator, rehearsal=plan)
    memory.ends = time.process_time() + LONGEST
    stage = spec.build(run, previous)
    shard.assert_supported(recipe.id, [stage], spec.cfg, precision=run.precision)
    limit = getattr(getattr(spec.cfg, "data", None), "max_length", 0)
    reads = "train" in stage.data
    if longest and limit and reads:
        stage.data["train"] = token_rows.Longest(stage.data["train"], limit)
    if not reads:
        plan.sizes = None
    total = _steps(spec.cfg, run, stage, samples, known=not longest)
    for p in stage.parameters().values():
        p.register_post_accumulate_grad_hook(memory.gradient)
    memory.flops, memory.largest = 0.0, ((), "", 0)
    memory.restart()
    try:
        with without_evaluation(stage):
            recipe.module.train(spec.cfg, run, stage)
    except Stop:
        raise
    except Exception as error:
        missing.append(f"a training step: {_describe(error)}")
    memory.ends = math.inf
    training, flops, largest, scoring = memory.peak, memory.flops, memory.largest, memory.without_gradients
    tokens = token_rows.tokens(stage.data["train"], micro) if reads else 0
    ours = _size([*stage.model.state_dict().values(), *stage.model.buffers()])
    average = 0 if stage.ema_model is None else _size(stage.ema_model.state_dict().values())
    frozen = _size(t for m in stage.frozen_modules.values() for t in m.state_dict().values())
    trained = list(stage.parameters().values())
    state = _size(x for o in stage.optimizers.values() for x in tree_leaves(list(o.state.values())))
    buckets = processes > 1 and spec.cfg.run.shard == shard.NONE  # DDP's copy of the gradients
    gradients = _size(trained) * (2 if buckets else 1)
    held = ours + average + frozen + state
    least = held + gradients
    for p in trained:
        p.grad = None
    evaluation = _evaluation(run, stage, memory, t.eval_batch_size, missing)
    kept, inside = _saved(stage)
    return stage, Estimate(
        stage=spec.name, parameters=sum(p.numel() for p in stage.model.parameters()), trained=sum(p.numel() for p in trained),
        weights=ours, average=average, frozen=frozen, gradients=gradients, optimizer=state, micro_batch=micro,
        micro_batches=t.accumulate if reads else 1, training=max(least, training + (_size(trained) if buckets else 0)), largest=largest,
        computing=max(0, scoring - held), flops=processes * flops / STEPS * (t.accumulate / pieces if reads else 1), steps=total, tokens=tokens,
        gate_batch=stage.expect.gate_batch_size or t.batch_size, **_units(stage, run), checkpoint=kept + state + inside, best=kept,
        evaluation=evaluation, cache=_cache(stage, spec.cfg), missing=missing,
    )  # fmt: skip


def _saved(stage: Stage) -> tuple[int, int]:
    """Return the bytes of the model and of other objects in a checkpoint."""
    elsewhere = stage.not_saved  # walks the whole model: asked once
    kept = _size(v for n, v in stage.model.state_dict().items() if n not in elsewhere)
    return kept, _size(x for s in stage.state.values() for x in tree_leaves(s.state_dict()))


def _evaluation(run: Run, stage: Stage, memory: Simulation, batch_size: int, missing: list[str]) -> int | None:
    """Return the peak memory of evaluating one batch; None if there is nothing to evaluate on or it failed (then `missing` says why)."""
    val, peak = stage.data.get("val"), None
    if val is None or not len(val):
        return None
    memory.restart()
    memory.ends = time.process_time() + LONGEST_EVALUATION
    try:
        run.measure(stage, View(val, range(min(len(val), batch_size))))
        peak = memory.peak
    except TooLong:  # a generation: its later steps need what its first ones do, and their keys and values
        peak = memory.peak
    except Exception as error:
        missing.append(f"the evaluation: {_describe(error)}")
    memory.ends = math.inf
    return peak


def without_evaluation(stage: Stage) -> AbstractContextManager:
    """Leave the evaluation out of `train()`: it is simulated alone."""

    def evaluate(model: nn.Module, data: Data) -> dict[str, float]:
        return {stage.metric.name: stage.metric.floor}

    return mock.patch.object(stage, "evaluate", evaluate)


def _steps(cfg: Any, run: Run, stage: Stage, samples: int | None, *, known: bool) -> int | None:
    if "train" in stage.data and samples is None and not known:
        return None
    plan, run.rehearsal = run.rehearsal, None
    try:
        if samples is not None and "train" in stage.data:
            steps = max(1, -(-int(cfg.train.epochs * samples) // cfg.train.batch_size))
            return min(steps, cfg.train.max_steps) if cfg.train.max_steps else steps
        return run.total_steps(stage)
    finally:
        run.rehearsal = plan


def _units(stage: Stage, run: Run) -> dict[str, int]:
    """Return the bytes of the largest unit of `--shard`, of the parameters outside units, and of all units in bf16 if they are gathered
    in bf16; zeros if the stage cannot be sharded."""
    if stage.shard_units is None:
        return {"unit": 0, "outside": 0}
    units = [list(unit.parameters()) for unit in stage.shard_units(stage.model)]
    inside = {id(p) for unit in units for p in unit}
    wide = _size(p for p in stage.model.parameters() if id(p) in inside and p.dtype == torch.float32)
    halves = run.cfg.run.shard != shard.NONE and shard.gathers_halves(stage, run.precision)
    return {
        "unit": max(map(_size, units), default=0),
        "outside": _size(p for p in stage.model.parameters() if id(p) not in inside),
        "halves": wide // 2 if halves else 0,  # of weights in 16 bits already there are no copies
    }


def _size(tensors: Any) -> int:
    """Bytes of tensors, each storage once."""
    once = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(once.values())


def _cache(stage: Stage, cfg: Any) -> int:
    """Bytes of the keys and values of one batch that the evaluation generates."""
    config = getattr(stage.model, "config", None)
    new = getattr(cfg, "max_new_tokens", 0)
    if not new or not hasattr(config, "num_hidden_layers"):
        return 0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    data = getattr(cfg, "data", None)
    prompt = getattr(data, "max_prompt", 0) or getattr(data, "max_length", 0) or 0
    length = min(prompt + new, getattr(config, "max_position_embeddings", None) or prompt + new)
    each = next(stage.model.parameters()).element_size()
    return 2 * config.num_hidden_layers * heads * width * each * length * cfg.train.eval_batch_size


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
