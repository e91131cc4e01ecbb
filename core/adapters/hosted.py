"""Runs trainers of `transformers` and TRL with core's steps. Only this file and trainer.py in core know these libraries.

`trainer.train()` runs unchanged, with all overrides of a subclass. It gets core's micro-batches in core's order instead
of its loader's. The stage uses the trainer's optimiser, collator and `compute_loss`, so gates test what the trainer
does.
"""

import math
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch import Tensor, nn
from torch.optim import Optimizer
from trainworthy.core.adapters.dropped_rows import DroppedRows
from trainworthy.core.base import seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop import shard
from trainworthy.core.loop.run import Run, Step
from trainworthy.core.recipe.stage import Stage, batch_size
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import logging

# TRL 1.16 uses a name that transformers 5.23 deprecates, in every loss.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


_aligned: set[str] = set()


def _once(record: Any) -> bool:
    """Let this message of every `trainer.train()` through the first time: gates train a dozen models with one tokenizer."""
    text = record.getMessage()
    if "The tokenizer has new PAD/BOS/EOS" not in text:
        return True
    new = text not in _aligned
    _aligned.add(text)
    return new


logging.get_logger("transformers.trainer_utils").addFilter(_once)

OWN = {"loss", "grad_norm", "learning_rate", "epoch"}  # entries of the trainer's log that core already logs


@dataclass
class Hosted(Stage):
    """A stage that a library's trainer trains."""

    trainer: Trainer = field(kw_only=True)
    own_rates: bool = False
    """Use the trainer's schedule; else core sets the rates from --optim.*."""
    ask: Callable[[int], list[dict]] | None = None
    """If the trainer makes its own samples (GRPO): iteration -> this process's rows from which it makes them. The stage
    then has no training set."""
    passes: int = 1
    """Optimiser steps on the samples of one such iteration."""
    epochs: float = 1.0
    """Epochs of the trainer's own run, which rehearsals do not train."""


LIBRARIES = ("transformers.", "trl.")


def own_loss(trainer: Trainer) -> bool:
    """Return whether a subclass or an argument of the user's computes the loss: its value before training and its floor are not known."""
    given = [getattr(type(trainer), k, None) for k in ("compute_loss", "_compute_loss")]
    given.append(getattr(trainer, "compute_loss_func", None))
    return not all(f is None or f.__module__.startswith(LIBRARIES) for f in given)


def host(trainer: Trainer, run: Run, **parts: Any) -> Hosted:
    """Build the stage of `trainer`: its model, its optimiser (or the one it was given) and its loss, with the `parts`
    of a Stage that trainers lack: name, data, evaluate, metric. Core sets precision and, at every step, the learning
    rate."""
    if run.precision == "fp16":
        raise UserError(
            "a hosted trainer does not scale its loss for fp16", got="precision fp16", needed="bf16 or fp32"
        )
    if getattr(trainer.args, "precompute_ref_log_probs", False):
        raise UserError(
            "the recipe reads the samples itself, not the trainer's data set with the reference's log-probabilities",
            got="precompute_ref_log_probs=True", needed="precompute_ref_log_probs=False: the frozen reference computes them",
        )  # fmt: skip
    optimizer = quiet(trainer)
    trainer.compute_loss_context_manager = run.autocast
    trainer.lr_scheduler = _Core(optimizer)
    if "ask" in parts:
        _made(trainer, run, parts.get("passes", 1))
    else:
        _weigh(trainer)
    own = {
        "loss": lambda model, batch: {"loss": loss(trainer, model, batch) * count(trainer, batch)},
        "counts": lambda batch: {"loss": count(trainer, batch)},
    }
    return Hosted(model=trainer.model, optimizers={"main": optimizer}, trainer=trainer, **(own | parts))


def _weigh(trainer: Trainer) -> None:
    """Weight micro-batches by their samples if the trainer's loss is a mean over samples, since accumulation would give
    a mean of means. The trainer fetches all micro-batches of a step before it computes the first loss, so each
    micro-batch's weight is queued in `shares`."""
    own, trainer.shares = trainer.compute_loss, deque()

    def weighed(*args: Any, **kwargs: Any) -> Any:
        waiting = getattr(trainer, "shares", None)  # none in an evaluation
        share = waiting.popleft() if waiting else 1.0
        out = own(*args, **kwargs)
        return (out[0] * share, *out[1:]) if isinstance(out, tuple) else out * share

    trainer.compute_loss = weighed


def _made(trainer: Trainer, run: Run, passes: int) -> None:
    """Let a trainer that makes samples while preparing inputs do so once per iteration. Core divides them into
    micro-batches, and gates receive the batch that was used."""
    own = trainer._prepare_inputs

    def prepared(rows: Any) -> dict[str, Any]:
        inputs = own(rows)
        if not trainer.model.training:
            return inputs
        each = trainer.args.steps_per_generation
        at = trainer._step % (each * passes)
        if at == 0:
            trainer._buffered_inputs = _recut(run, trainer._buffered_inputs)
        run.used_batches = [{k: v for k, v in part.items() if v.dim()} for part in trainer._buffered_inputs]
        return trainer._buffered_inputs[at % each]

    trainer._prepare_inputs = prepared


def _recut(run: Run, parts: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Divide the samples of an iteration into core's micro-batches. Scalars (the number of scored tokens) are copied to
    each."""
    whole = {k: v for k, v in parts[0].items() if not v.dim()}
    rows = {k: torch.cat([part[k] for part in parts]) for k in parts[0] if k not in whole}
    return [{**part, **whole} for part in run.micro_batches(rows)]


def train(run: Run, stage: Hosted, after: Callable[[Step], None] | None = None, *, eval_every: float = 1.0) -> None:
    """Run `trainer.train()` over the steps of `run`, with an evaluation every `eval_every` epochs; or with `after`, which is called
    after each update, in place of it."""
    if run.shard != shard.NONE:
        shard.under_trainer(stage.trainer, stage.model, run.world)
    steps = run.steps(stage)
    first = next(steps, None)
    if first is None:
        return  # the run was resumed after its last step

    def batches() -> Iterator[dict | list[dict]]:
        # The trainer logs a mean since this step.
        stage.trainer.state.global_step = stage.trainer._globalstep_last_logged = run.started * stage.passes
        step: Step | None = first
        while step is not None:
            seeds.seed_global(run.cfg.run.seed, "model", step.index, run.rank)  # the trainer may draw while preparing
            if stage.own_rates and not (run.rehearsal and run.rehearsal.peak):
                rates = stage.trainer.lr_scheduler.get_last_lr()
                for group, rate in zip(stage.optimizers["main"].param_groups, rates, strict=True):
                    group["lr"] = rate
            if stage.ask is not None:
                yield from [stage.ask(step.index)] * (stage.passes * accumulate)
            for batch, keys in zip(step.batches, step.keys, strict=True):
                if shares is not None:
                    counted = items_of(stage.trainer, inputs(batch)) is not None
                    shares.append(1.0 if counted else len(keys) * run.world * len(step.keys) / size)
                yield batch
            if after is not None:
                after(step)
            elif step.due(eval_every):
                run.evaluate(stage)
            step = next(steps, None)

    size = run.mode.step_size(run.cfg)
    shares = getattr(stage.trainer, "shares", None)  # a script's own trainer is tested unchanged
    accumulate = len(first.batches)
    if stage.ask is not None:
        accumulate = len(run.rehearsal.sizes) if run.rehearsal and run.rehearsal.sizes else run.cfg.train.accumulate
        stage.trainer.args.steps_per_generation = accumulate

    def note(logs: dict[str, float]) -> None:
        values = {"loss": logs["loss"], "grad_norm": logs["grad_norm"]}
        batches = (run.current.batches if run.current else []) or run.used_batches
        run.log_update(stage.optimizers.values(), batches, list(values), torch.tensor(list(values.values())))
        more = {k: v for k, v in logs.items() if k not in OWN and isinstance(v, (int, float))}
        run.log("trainer", more)

    clip = run.cfg.optim.clip
    stage.trainer.args.max_grad_norm = clip if math.isfinite(clip) else 0.0
    drive(stage.trainer, batches(), run.total_steps(stage) * stage.passes, accumulate, note)


def drive(
    trainer: Trainer,
    batches: Iterator[dict | list[dict]],
    steps: int,
    accumulate: int,
    note: Callable[[dict], None] = lambda logs: None,
) -> None:
    """Run `trainer.train()` on `batches`, `accumulate` of them for each of at most `steps` optimiser steps; `note` gets
    the trainer's log of every step. It ends when `batches` does."""
    args = trainer.args
    args.max_steps, args.gradient_accumulation_steps = steps, accumulate
    feed, watch = _Feed(trainer, batches, steps * accumulate), _Watch(trainer, note)
    own = trainer.__dict__.get("get_train_dataloader")
    trainer.get_train_dataloader = lambda: feed
    trainer.add_callback(watch)
    try:
        trainer.train()
    finally:
        trainer.remove_callback(watch)
        del trainer.get_train_dataloader
        if own is not None:
            trainer.get_train_dataloader = own
    # The trainer requests no batch after its last step, so run here what follows that step.
    next(batches, None)


def built(factory: Callable[[], Trainer]) -> Trainer:
    """Build one trainer without its library's progress bars and messages, since gates build a dozen. Its `dropped_rows` are those of
    DroppedRows."""
    level, bars, dropped = logging.get_verbosity(), are_progress_bars_disabled(), DroppedRows()
    logging.set_verbosity_error()
    disable_progress_bars()
    own = Dataset.filter

    def noted(rows: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        kept = own(rows, *args, **kwargs)
        dropped.note(kept, rows, *args, **kwargs)
        return kept

    try:
        with mock.patch.object(Dataset, "filter", noted):
            trainer = factory()
        trainer.dropped_rows = dropped.rows
        return trainer
    except (ValueError, NotImplementedError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].name in ("__init__", "__post_init__") and "/trl/trainer/" in frames[-1].filename:
            raise UserError(
                "the trainer refuses its arguments", got=str(error), needed="arguments that it supports"
            ) from None
        raise
    finally:
        logging.set_verbosity(level)
        if not bars:
            enable_progress_bars()


def quiet(trainer: Trainer) -> Optimizer:
    """Turn off the trainer's logging, evaluation and saving, which core does. Return its optimiser without a
    wrapper."""
    args = trainer.args
    args.logging_strategy, args.logging_steps, args.logging_first_step = type(args.logging_strategy)("steps"), 1, False
    args.logging_nan_inf_filter = False  # else it logs a mean of earlier losses instead of a NaN
    args.eval_strategy, args.save_strategy = type(args.eval_strategy)("no"), type(args.save_strategy)("no")
    args.load_best_model_at_end, args.num_train_epochs = False, 1
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    if trainer.optimizer is None:
        made = trainer.create_optimizer()
        # The trainer makes a group without weight decay (norms, biases) even where nothing of that kind trains (LoRA).
        made.param_groups[:] = [group for group in made.param_groups if group["params"]]
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def inputs(batch: dict[str, Any] | list[dict]) -> dict[str, Any] | list[dict]:
    """Return the part of a batch that the trainer gets, without texts and columns that are for display and gates; or
    rows from which it makes its own batch."""
    if isinstance(batch, list):
        return batch
    if "inputs" in batch:
        return dict(batch["inputs"])
    return {k: v for k, v in batch.items() if not (isinstance(v, list) and v and isinstance(v[0], str))}


def count(trainer: Trainer, batch: dict) -> float | Tensor:
    """Return what the trainer's loss is a mean over: scored tokens if it counts them, else samples."""
    items = items_of(trainer, inputs(batch))
    return batch_size(cast(dict, inputs(batch))) if items is None else items


def loss(trainer: Trainer, model: nn.Module, batch: dict, *, accumulate: int = 1) -> Tensor:
    """Call `compute_loss` on one batch as one micro-batch: a mean, normalised as in training. `accumulate`: the number
    of micro-batches that the trainer assumes."""
    one = inputs(batch)
    items, trainer.current_gradient_accumulation_steps = items_of(trainer, one), accumulate
    shares = trainer.__dict__.pop("shares", None)
    value = trainer.compute_loss(model, one, num_items_in_batch=items)
    if shares is not None:
        trainer.shares = shares
    if items is not None and trainer.args.average_tokens_across_devices:
        value = value / trainer.accelerator.num_processes  # no DDP mean to undo here
    return value


def items_of(trainer: Trainer, batch: dict | list[dict]) -> Tensor | None:
    """Return the scored tokens of this process's batch, as the trainer counts them over all processes."""
    if trainer.accelerator.num_processes == 1:
        return trainer._get_num_items_in_batch([batch], trainer.args.device)
    with mock.patch.object(trainer.args, "average_tokens_across_devices", False):
        return trainer._get_num_items_in_batch([batch], trainer.args.device)


class _Core:
    """A scheduler whose step does nothing, because core sets the rates."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer

    def step(self) -> None:
        """Do nothing: core sets the rate before the step."""

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


class _Feed:
    """Replaces the trainer's loader: yields core's batches, once."""

    batch_sampler = None

    def __init__(self, trainer: Trainer, batches: Iterable[dict | list[dict]], length: int):
        self.trainer, self.batches, self.length = trainer, batches, length
        self.dataset = trainer.train_dataset

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict | list[dict]]:
        yield from map(inputs, self.batches)
        self.trainer.control.should_training_stop = True


class _Watch(TrainerCallback):
    """Checks gradients before each optimiser step, and passes on the trainer's log after it."""

    def __init__(self, trainer: Trainer, note: Callable[[dict], None]):
        self.trainer, self.note = trainer, note

    def on_pre_optimizer_step(self, args, state, control, **_) -> None:
        """Skip a step with a non-finite gradient by removing all gradients, so that the optimiser neither moves nor
        decays weights."""
        if self.trainer.accelerator.scaler is not None:  # fp16's scaler skips by itself
            return
        weights = [p for g in self.trainer.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if weights and not torch.isfinite(nn.utils.get_total_norm([p.grad for p in weights])):
            for p in weights:
                p.grad = None

    def on_log(self, args, state, control, logs: dict[str, float], **_) -> None:
        if "loss" in logs:  # the final summary has no loss
            self.note(logs)
            self.trainer._tr_loss.zero_()  # it subtracts the logged loss, so a NaN would stay for the rest of the run
            state.log_history.clear()
