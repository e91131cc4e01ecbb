"""Trainers of `transformers` and TRL: their own loop over core's steps. The one file in core that knows them.

`trainer.train()` runs as it is, with whatever a subclass overrides in it; it is handed core's micro-batches in place of its
loader's, in core's order. Its optimiser, its collator and its `compute_loss` are the stage's, so gates see what it does.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from torch import Tensor, nn
from torch.optim import Optimizer
from trainworthy.core.adapters.objective import smoothing_floor
from trainworthy.core.adapters.subject import Subject
from trainworthy.core.base import config, seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.run import Run, Step
from trainworthy.core.recipe.stage import Data, Expect, Field, Metric, Stage, View, batch_size
from transformers import EvalPrediction, PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.utils import logging

# TRL 1.16 asks a model by a name that transformers 5.23 deprecates, at every loss.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)

CHANCE = 256  # samples that what knowing nothing scores is measured on
SHOWN = 64  # validation samples that a rehearsal evaluates
OWN = {"loss", "grad_norm", "learning_rate", "epoch"}  # entries of the trainer's log that core has itself


@dataclass
class Hosted(Stage):
    """A stage that is trained by a library's trainer."""

    trainer: Trainer = field(kw_only=True)
    own_rates: bool = False
    """The trainer's schedule is what trains; else core's, by --optim.*."""
    ask: Callable[[int], list[dict]] | None = None
    """Where the trainer makes its samples itself (GRPO): unit -> this process's rows that it makes them from. The stage then has no
    training set."""
    passes: int = 1
    """Optimiser steps that are made from the samples of such a unit."""


def host(trainer: Trainer, run: Run, **parts: Any) -> Hosted:
    """The stage of `trainer`: its model, its optimiser (or the one it was given) and its loss, with the `parts` of a Stage that
    no trainer has: name, data, evaluate, metric. Schedule and precision are core's: the rate is set anew at every step."""
    if run.precision == "fp16":
        raise UserError(
            "a hosted trainer does not scale its loss for fp16", got="precision fp16", needed="bf16 or fp32"
        )
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
    """Where a trainer's loss is a mean over samples, accumulated gradients are a mean of means: each micro-batch then counts by its
    samples (`shares` of those to come: the trainer asks for all of a step before it computes one)."""
    own, trainer.shares = trainer.compute_loss, deque()

    def weighed(*args: Any, **kwargs: Any) -> Any:
        waiting = getattr(trainer, "shares", None)  # none: not a micro-batch of training
        share = waiting.popleft() if waiting else 1.0
        out = own(*args, **kwargs)
        return (out[0] * share, *out[1:]) if isinstance(out, tuple) else out * share

    trainer.compute_loss = weighed


def _made(trainer: Trainer, run: Run, passes: int) -> None:
    """A trainer that makes its samples as it prepares its inputs does so once a unit; they are cut into micro-batches as core cuts,
    and gates are told what was learnt from."""
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
    """The samples of a unit in core's micro-batches; what is one number for all (how many tokens they score) goes with each."""
    whole = {k: v for k, v in parts[0].items() if not v.dim()}
    rows = {k: torch.cat([part[k] for part in parts]) for k in parts[0] if k not in whole}
    return [{**part, **whole} for part in run.cut(rows)]


def train(run: Run, stage: Hosted, after: Callable[[Step], None]) -> None:
    """`trainer.train()` over the steps of `run`; `after` follows each update, where another recipe's loop has its evaluation."""
    steps = run.steps(stage)
    first = next(steps, None)
    if first is None:
        return  # resumed after its last step

    def batches() -> Iterator[dict]:
        # It logs a mean since then.
        stage.trainer.state.global_step = stage.trainer._globalstep_last_logged = run.started * stage.passes
        step = first
        while step is not None:
            seeds.seed_global(run.cfg.run.seed, "model", step.index, run.rank)  # the trainer's preparations may draw
            if stage.own_rates and not (run.plan and run.plan.peak):
                rates = stage.trainer.lr_scheduler.get_last_lr()
                for group, rate in zip(stage.optimizers["main"].param_groups, rates, strict=True):
                    group["lr"] = rate
            if stage.ask is not None:
                yield from [stage.ask(step.index)] * (stage.passes * accumulate)
            for batch, keys in zip(step.batches, step.keys, strict=True):
                if shares is not None:
                    counted = _items(stage.trainer, inputs(batch)) is not None
                    shares.append(1.0 if counted else len(keys) * run.world * len(step.keys) / size)
                yield batch
            after(step)
            step = next(steps, None)

    size = (run.plan and run.plan.batch_size) or run.cfg.train.batch_size
    shares = getattr(stage.trainer, "shares", None)  # a trainer that a script built is judged as it is
    accumulate = len(first.batches)
    if stage.ask is not None:
        accumulate = len(run.plan.sizes) if run.plan and run.plan.sizes else run.cfg.train.accumulate
        stage.trainer.args.steps_per_generation = accumulate

    def note(logs: dict[str, float]) -> None:
        values = {"loss": logs["loss"], "grad_norm": logs["grad_norm"]}
        batches = run.current.batches or run.used_batches
        run.note(stage.optimizers["main"], batches, list(values), torch.tensor(list(values.values())))
        more = {k: v for k, v in logs.items() if k not in OWN and isinstance(v, (int, float))}
        run.log("trainer", more)

    clip = run.cfg.optim.clip
    stage.trainer.args.max_grad_norm = clip if math.isfinite(clip) else 0.0
    drive(stage.trainer, batches(), run.total_steps(stage) * stage.passes, accumulate, note)


def drive(
    trainer: Trainer,
    batches: Iterator[dict],
    steps: int,
    accumulate: int,
    note: Callable[[dict], None] = lambda logs: None,
) -> None:
    """`trainer.train()` on `batches`, `accumulate` of them to each of at most `steps` optimiser steps; `note` gets the trainer's
    own log of every step. Ends where `batches` do."""
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
    # The trainer does not ask again after its last step, and what follows that step is still to come.
    next(batches, None)


def quiet(trainer: Trainer) -> Optimizer:
    """Leave logging, evaluation and saving to core; the trainer's optimiser, without a wrapper."""
    args = trainer.args
    args.logging_strategy, args.logging_steps, args.logging_first_step = type(args.logging_strategy)("steps"), 1, False
    args.logging_nan_inf_filter = False  # it would log a mean of earlier losses in place of a NaN
    args.eval_strategy, args.save_strategy = type(args.eval_strategy)("no"), type(args.save_strategy)("no")
    args.load_best_model_at_end, args.num_train_epochs = False, 1
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    optimizer = trainer.create_optimizer() if trainer.optimizer is None else trainer.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def inputs(batch: dict[str, Any] | list[dict]) -> dict[str, Any] | list[dict]:
    """What the trainer gets of a batch: texts and columns are for people and gates. Rows it makes its own batch from."""
    if isinstance(batch, list):
        return batch
    if "inputs" in batch:
        return dict(batch["inputs"])
    return {k: v for k, v in batch.items() if not (isinstance(v, list) and v and isinstance(v[0], str))}


def count(trainer: Trainer, batch: dict) -> float | Tensor:
    """What the trainer's loss is a mean over: scored tokens where it counts them, else samples."""
    items = _items(trainer, inputs(batch))
    return batch_size(inputs(batch)) if items is None else items


def loss(trainer: Trainer, model: nn.Module, batch: dict, *, accumulate: int = 1) -> Tensor:
    """`compute_loss` on one batch as a micro-batch of its own: a mean, normalised as in training. `accumulate`: micro-batches that
    the trainer takes it for one of."""
    one = inputs(batch)
    items, trainer.current_gradient_accumulation_steps = _items(trainer, one), accumulate
    shares = trainer.__dict__.pop("shares", None)
    value = trainer.compute_loss(model, one, num_items_in_batch=items)
    if shares is not None:
        trainer.shares = shares
    if items is not None and trainer.args.average_tokens_across_devices:
        value = value / trainer.accelerator.num_processes  # undone by DDP's mean, which is not here
    return value


def _items(trainer: Trainer, batch: dict) -> Tensor | None:
    """Scored tokens of this process's batch, as the trainer counts them over all processes."""
    if trainer.accelerator.num_processes == 1:
        return trainer._get_num_items_in_batch([batch], trainer.args.device)
    across, trainer.args.average_tokens_across_devices = trainer.args.average_tokens_across_devices, False
    try:
        return trainer._get_num_items_in_batch([batch], trainer.args.device)
    finally:
        trainer.args.average_tokens_across_devices = across


class _Core:
    """The scheduler that the trainer ticks where core sets the rates: it leaves them as they are."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer = optimizer

    def step(self) -> None:
        """Core's turn is before the step."""

    def get_last_lr(self) -> list[float]:
        """The present rates."""
        return [group["lr"] for group in self.optimizer.param_groups]


class _Feed:
    """What the trainer takes for its loader: batches that come from core, once."""

    batch_sampler = None

    def __init__(self, trainer: Trainer, batches: Iterable[dict], length: int):
        self.trainer, self.batches, self.length = trainer, batches, length
        self.dataset = trainer.train_dataset

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[dict]:
        yield from map(inputs, self.batches)
        self.trainer.control.should_training_stop = True


class _Watch(TrainerCallback):
    """The finite check before each optimiser step, and the trainer's log of it afterwards."""

    def __init__(self, trainer: Trainer, note: Callable[[dict], None]):
        self.trainer, self.note = trainer, note

    def on_pre_optimizer_step(self, args, state, control, **_) -> None:
        """A step whose gradient is not finite is skipped whole: without gradients an optimiser neither moves nor decays."""
        if self.trainer.accelerator.scaler is not None:  # fp16's scaler does so by itself
            return
        weights = [p for g in self.trainer.optimizer.param_groups for p in g["params"] if p.grad is not None]
        if weights and not torch.isfinite(nn.utils.get_total_norm([p.grad for p in weights])):
            for p in weights:
                p.grad = None

    def on_log(self, args, state, control, logs: dict[str, float], **_) -> None:
        if "loss" in logs:  # the summary at the end has none
            self.note(logs)
            self.trainer._tr_loss.zero_()  # it subtracts what it has logged, and NaN - NaN is NaN for the rest of the run
            state.log_history.clear()


# ------------------------------------------------------------------------------- the gates on a trainer that a script builds
class Rows(Data):
    """A trainer's data set as core reads it: the columns that its collator gets, lists as tensors; batches as it collates them."""

    def __init__(self, trainer: Trainer, rows: Any):
        named = hasattr(rows, "column_names")  # of `datasets`; other sets have their columns taken off while collating
        self.rows = trainer._remove_unused_columns(rows, "checked") if named else rows
        self._collate = (
            trainer.data_collator if named else trainer._get_collator_with_removed_columns(trainer.data_collator)
        )
        self._lists = {k for k, v in self.rows[0].items() if isinstance(v, list)}
        self.fields = {k: Field("target" if "label" in k else "input") for k, v in self._read(self.rows[0]).items()
                       if isinstance(v, (Tensor, int, float, str))}  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return self._read(self.rows[index])

    def _read(self, row: dict[str, Any]) -> dict[str, Any]:
        numbers = {k for k in self._lists if row[k] and isinstance(row[k][0], (int, float))}
        return {k: torch.tensor(v) if k in numbers else v for k, v in row.items()}

    def row(self, sample: dict[str, Any]) -> dict[str, Any]:
        """A sample as the trainer's own data set gives it."""
        return {k: v.tolist() if k in self._lists and isinstance(v, Tensor) else v for k, v in sample.items()}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """{"inputs": the trainer's batch} beside the columns, one entry a sample."""
        columns = {k: [s[k] for s in samples] for k in self.fields}
        return {"inputs": dict(self._collate([self.row(s) for s in samples])), **columns}


def subject(factory: Callable[[], Trainer], seed: int) -> Subject:
    """What `core.check` proves of the trainers that `factory` builds."""
    probe = built(factory)
    args, model = probe.args, probe.model
    if probe.eval_dataset is None:
        raise UserError("the trainer has no eval_dataset", needed="some samples it is not trained on")
    if isinstance(probe.eval_dataset, dict) or not all(
        hasattr(d, "__len__") for d in (probe.train_dataset, probe.eval_dataset)
    ):
        raise UserError(
            "the trainer's data sets must be map-style", needed="one train_dataset and one eval_dataset with len()"
        )
    if {id(p) for p in built(factory).model.parameters()} & {id(p) for p in model.parameters()}:
        raise UserError("the factory returns the same model twice", needed="a new model and a new trainer at every call",
                        cause="the model is built outside the factory")  # fmt: skip
    clip, accumulate = args.max_grad_norm or math.inf, args.gradient_accumulation_steps
    cfg = config.Config(
        train=config.Train(batch_size=args.per_device_train_batch_size * accumulate, accumulate=accumulate,
                           precision="bf16" if args.bf16 else "fp32"),
        optim=config.Optim(clip=clip, schedule="constant", warmup=0.0, lr=args.learning_rate),
        run=config.RunSettings(seed=seed),
    )  # fmt: skip
    quiet(probe)
    some = CHANCE if args.greater_is_better else 16  # where lower is better, the untrained model's is chance
    start = _measured(probe, Rows(probe, probe.eval_dataset), range(min(some, len(probe.eval_dataset))))
    start |= _constant(probe, start)
    make = lambda run: _stage(factory, run, start)  # noqa: E731
    return Subject(cfg, args.device, make, _train, _skips(probe), own_loop=False)


def built(factory: Callable[[], Trainer]) -> Trainer:
    """One trainer, without the bars and remarks of its libraries: gates build a dozen."""
    level, bars = logging.get_verbosity(), are_progress_bars_disabled()
    logging.set_verbosity_error()
    disable_progress_bars()
    try:
        return factory()
    finally:
        logging.set_verbosity(level)
        if not bars:
            enable_progress_bars()


def _skips(probe: Trainer) -> dict[str, str]:
    """Gates that have nothing to judge in a trainer, and why."""
    rows = Rows(probe, probe.eval_dataset)
    answers = [k for k in rows.fields if "label" in k]
    one_text = not answers or any(k in rows._lists for k in answers)
    counted = _items(probe, rows.collate([rows.get(0, None)])["inputs"]) is not None
    skips = {
        "initial-loss": "no expectation of it",
        "init": "whether weights are loaded is the factory's own affair",
        "range-test": "trainworthy.LRFinder tests the rate",
        "resume": "the trainer's own checkpoints are not rehearsed",
        "baseline": "the answer is part of the input" * one_text,
        "tiny-data": "the answer is part of the input" * one_text,
        "accumulation": "it does not accumulate gradients"
        if probe.args.gradient_accumulation_steps == 1
        else "its loss is a mean per micro-batch: exact as long as all are of one size" * (not counted),
    }
    return {k: v for k, v in skips.items() if v}


def _stage(factory: Callable[[], Trainer], run: Run, start: dict[str, float]) -> Hosted:
    trainer = built(factory)
    optimizer = quiet(trainer)
    for group in optimizer.param_groups:
        group["peak_lr"] = max(group["lr"], group.get("initial_lr", 0.0))
    name = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    if name not in start:
        raise UserError(
            f"the trainer's evaluation has no '{name}'", got=", ".join(start), cause="metric_for_best_model"
        )
    higher = bool(trainer.args.greater_is_better)
    floor, ceiling = (min(start[name], 0.95), 1.0) if higher else (start[name], 0.0)
    data = {"train": Rows(trainer, trainer.train_dataset), "val": Rows(trainer, trainer.eval_dataset)}
    frozen = tuple(n for n, p in trainer.model.named_parameters() if not p.requires_grad)
    return Hosted(
        name=type(trainer).__name__,
        model=trainer.model,
        optimizers={"main": optimizer},
        data=data,
        loss=lambda model, batch: {"loss": loss(trainer, model, batch) * count(trainer, batch)},
        counts=lambda batch: {"loss": count(trainer, batch)},
        evaluate=lambda model, chosen: _measured(trainer, chosen, range(len(chosen))),
        metric=Metric(name, "", floor=floor, ceiling=ceiling, higher_is_better=higher),
        expect=Expect(
            schedule="the trainer's own",
            frozen=frozen,
            overfit_steps=300,
            overfit_metric=floor + 0.95 * (ceiling - floor),
            loss_floor=_smoothed(trainer),
        ),
        trainer=trainer,
        own_rates=True,
    )


def _constant(trainer: Trainer, start: dict[str, float]) -> dict[str, float]:
    """Chance, measured: each metric of `start` (the untrained model's) at the best that one answer for all samples scores, where
    that is better and answers are classes."""
    if trainer.compute_metrics is None or not trainer.args.greater_is_better:
        return {}
    rows = Rows(trainer, trainer.eval_dataset)
    try:
        some = [rows.row(rows.get(i, None)) for i in range(min(CHANCE, len(rows)))]
        found = trainer.predict(Dataset.from_list(some))
        logits, labels = found.predictions, found.label_ids
        if getattr(labels, "ndim", 0) != 1 or not np.issubdtype(labels.dtype, np.integer):
            return {}
        best = dict(start)
        for answer in np.unique(labels):
            same = np.full_like(logits, answer) if logits.ndim == 1 else np.zeros_like(logits)
            if logits.ndim == 2:
                same[:, answer] = 1
            scored = trainer.compute_metrics(EvalPrediction(predictions=same, label_ids=labels))
            scored = {k.removeprefix("eval_"): float(v) for k, v in scored.items() if isinstance(v, (int, float))}
            best |= {k: max(v, best[k]) for k, v in scored.items() if k in best}
    except (
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
    ):  # a metric of another kind of answer: the untrained model's stands
        return {}
    return {k: v for k, v in best.items() if k != "loss"}


def _smoothed(trainer: Trainer) -> float:
    """Lowest loss under `label_smoothing_factor`."""
    eps, config = trainer.args.label_smoothing_factor, getattr(trainer.model, "config", None)
    classes = getattr(config, "num_labels" if trainer.compute_metrics else "vocab_size", 0)
    return smoothing_floor(eps, classes) if eps and classes else 0.0


def _measured(trainer: Trainer, data: Data, indices: Iterable[int]) -> dict[str, float]:
    """`trainer.evaluate` on some samples; its numbers, without what depends on the clock."""
    rows = [_source(data).row(data.get(i, None)) for i in indices]
    own, trainer.eval_dataset = trainer.eval_dataset, {"some": Dataset.from_list(rows)}
    try:
        found = trainer.evaluate("some")  # by name: TRL prepares what it is handed once more
    finally:
        trainer.eval_dataset = own
    return {k.removeprefix("eval_"): float(v) for k, v in found.items() if k.startswith("eval_") and "per_second" not in k
            and not k.endswith(("runtime", "num_tokens")) and isinstance(v, (int, float))}  # fmt: skip


def _source(data: Data) -> Rows:
    while isinstance(data, View):
        data = data.data
    return data


def _train(cfg: config.Config, run: Run, stage: Hosted) -> None:
    """The trainer's loop and, where one is due, its evaluation."""
    val = stage.data["val"]

    def after(step: Step) -> None:
        if step.due(1):
            _measured(stage.trainer, val, range(min(SHOWN, len(val))))

    train(run, stage, after)
