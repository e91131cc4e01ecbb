"""The gates on a trainer of `transformers` or TRL that a script builds: its data sets, its evaluation, its chance level."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from trainworthy.core.adapters.hosted import Hosted, built, count, inputs, items_of, loss, quiet, train
from trainworthy.core.base import config, seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.run import Run, Step
from trainworthy.core.recipe.stage import Data, Expect, Field, Metric, View
from trainworthy.guard.adapters.class_weights import of_trainer, total_weight
from trainworthy.guard.adapters.objective import smoothing_floor
from trainworthy.guard.adapters.script_stage import peaks
from trainworthy.guard.adapters.subject import Subject
from trainworthy.guard.adapters.trainer_gates import GATES, reachable
from trainworthy.guard.measures.trainers import trainer_counts
from transformers import EvalPrediction, Trainer

CHANCE = 256  # samples on which the chance level is measured
SHOWN = 64  # validation samples per evaluation in a rehearsal


class Rows(Data):
    """A trainer's data set for core: the columns that its collator gets, with lists as tensors; batches as it collates
    them. On the training path, and for `fixed` rows (augmented as they are read, `with_transform`) on the evaluation path too, the
    global generators are seeded."""

    def __init__(self, trainer: Trainer, rows: Any, *, fixed: bool = False):
        self._fixed = fixed
        named = hasattr(rows, "column_names")  # of `datasets`; other sets lose unused columns in the collator
        self.rows = trainer._remove_unused_columns(rows, "checked") if named else rows
        own = trainer.data_collator
        self._collate = own if named else trainer._get_collator_with_removed_columns(own)
        self._lists = {k for k, v in self.rows[0].items() if isinstance(v, list)}
        self.fields = {k: Field("target" if "label" in k else "input") for k, v in self._read(self.rows[0]).items()
                       if isinstance(v, (Tensor, int, float, str))}  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        if generator is not None:
            seeds.seed_all(generator.initial_seed())
        elif self._fixed:
            seeds.seed_all(seeds.derive("fixed", index))
        return self._read(self.rows[index])

    def _read(self, row: dict[str, Any]) -> dict[str, Any]:
        numbers = {k for k in self._lists if row[k] and isinstance(row[k][0], (int, float))}
        return {k: torch.tensor(v) if k in numbers else v for k, v in row.items()}

    def row(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample as the trainer's own data set does."""
        return {k: v.tolist() if k in self._lists and isinstance(v, Tensor) else v for k, v in sample.items()}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Return {"inputs": the trainer's batch} plus the columns, one entry per sample."""
        columns = {k: [s[k] for s in samples] for k in self.fields}
        return {"inputs": dict(self._collate([self.row(s) for s in samples])), **columns}


def subject(factory: Callable[[], Trainer], seed: int) -> Subject:
    """Return what `core.check` tests of the trainers that `factory` builds."""
    probe = built(factory)
    args, model = probe.args, probe.model
    if probe.eval_dataset is None:
        raise UserError("the trainer has no eval_dataset", needed="eval_dataset= samples that it is not trained on")
    sized = hasattr(probe.train_dataset, "__len__") and hasattr(probe.eval_dataset, "__len__")
    if isinstance(probe.eval_dataset, dict) or not sized:
        needed = "one train_dataset and one eval_dataset with len()"
        raise UserError("the trainer's data sets must be map-style", needed=needed)
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
    some = CHANCE if args.greater_is_better else 16  # if lower is better, the untrained model's score is chance level
    start = _measured(probe, Rows(probe, probe.eval_dataset), range(min(some, len(probe.eval_dataset))))
    start |= _constant(probe, start)
    make = lambda run: _stage(factory, start)  # noqa: E731
    causes = {}
    with contextlib.suppress(Exception):  # whatever these rows raise, the gates meet it
        if fault := trainer_counts.undivided(probe):
            causes["accumulation"] = fault[1]
    return Subject(cfg, args.device, make, _train, _skips(probe), own_loop=False, causes=causes)


def _skips(probe: Trainer) -> dict[str, str]:
    """Return the gates that do not apply to a trainer, with reasons."""
    rows = Rows(probe, probe.eval_dataset)
    answers = [k for k in rows.fields if "label" in k]
    one_text = not answers or any(k in rows._lists for k in answers)
    counted = items_of(probe, rows.collate([rows.get(0, None)])["inputs"]) is not None
    skips = {
        "initial-loss": "its value is not declared",
        "init": "the factory decides which weights are loaded",
        "range-test": "trainworthy.LRFinder tests the rate",
        "resume": "the trainer's own checkpoints are not rehearsed",
        "baseline": "the answer is part of the input" * one_text,
        "tiny-data": "the answer is part of the input" * one_text,
        "accumulation": "it does not accumulate gradients"
        if probe.args.gradient_accumulation_steps == 1
        else "its loss is a mean per micro-batch: exact as long as all are of one size" * (not counted),
        "dependency": "micro-batches are averaged without the class weights of their samples"
        * (probe.args.gradient_accumulation_steps > 1 and of_trainer(probe, rows) is not None),
    }
    return {k: v for k, v in skips.items() if v}


def _stage(factory: Callable[[], Trainer], start: dict[str, float]) -> Hosted:
    trainer = built(factory)
    epochs = trainer.args.num_train_epochs
    optimizer = quiet(trainer)
    for group, rate in zip(optimizer.param_groups, peaks(optimizer), strict=True):
        group["peak_lr"] = rate
    if trainer.lr_scheduler is not None:
        _hold(trainer.lr_scheduler)
    name = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    if name not in start:
        what = f"the trainer's evaluation has no '{name}'"
        raise UserError(what, got=", ".join(start), cause="metric_for_best_model")
    higher = bool(trainer.args.greater_is_better)
    best = _smoothed(trainer) if name.endswith("loss") else 0.0
    floor, ceiling = (min(start[name], 0.95), 1.0) if higher else (start[name], best)
    goal = floor + 0.95 * (ceiling - floor)
    data = {"train": Rows(trainer, trainer.train_dataset, fixed=True), "val": Rows(trainer, trainer.eval_dataset)}
    weights = of_trainer(trainer, data["val"]) if trainer.args.gradient_accumulation_steps == 1 else None

    def size(batch: dict) -> float | Tensor:
        """Return what the loss of a batch is a mean over: samples, scored tokens, or their class weights."""
        return count(trainer, batch) if weights is None else total_weight(weights, cast(dict, inputs(batch))["labels"])

    frozen = tuple(n for n, p in trainer.model.named_parameters() if not p.requires_grad)
    return Hosted(
        name=type(trainer).__name__,
        model=trainer.model,
        optimizers={"main": optimizer},
        data=data,
        loss=lambda model, batch: {"loss": loss(trainer, model, batch) * size(batch)},
        counts=lambda batch: {"loss": size(batch)},
        evaluate=lambda model, chosen: _measured(trainer, chosen, range(len(chosen))),
        metric=Metric(name, "", floor=floor, ceiling=ceiling, higher_is_better=higher),
        expect=Expect(
            schedule="the trainer's own",
            frozen=frozen,
            overfit_steps=300,
            overfit_longer=True,
            overfit_metric=lambda batch: reachable(trainer, batch, name, goal),
            loss_floor=_smoothed(trainer),
        ),
        trainer=trainer,
        own_rates=True,
        epochs=epochs,
        gates=list(GATES),
    )


def _hold(scheduler: Any) -> None:
    """Let a schedule of fixed length that was passed in keep its last rate: a gate may take more steps than the run, and OneCycleLR
    raises then."""
    own, total = scheduler.step, getattr(scheduler, "total_steps", None) or math.inf

    def step(*args: Any, **kwargs: Any) -> None:
        if scheduler.last_epoch + 1 < total:
            own(*args, **kwargs)

    scheduler.step = step


def _constant(trainer: Trainer, start: dict[str, float]) -> dict[str, float]:
    """Measure chance level: replace each metric of `start` (the untrained model's) by the best score of one constant
    answer, if that is better and answers are classes."""
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
    except (TypeError, ValueError, IndexError, AttributeError):
        return {}  # the metric needs another kind of answer: keep the untrained model's score
    return {k: v for k, v in best.items() if k != "loss"}


def _smoothed(trainer: Trainer) -> float:
    """Return the lowest loss under `label_smoothing_factor`."""
    eps, model = trainer.args.label_smoothing_factor, trainer.model
    tokens = getattr(model, "get_output_embeddings", lambda: None)()  # of models that predict tokens
    classes = getattr(getattr(model, "config", None), "num_labels" if tokens is None else "vocab_size", 0)
    return smoothing_floor(eps, classes) if eps and classes else 0.0


def _measured(trainer: Trainer, data: Data, indices: Iterable[int]) -> dict[str, float]:
    """Run `trainer.evaluate` on some samples; return its numbers without timings."""
    rows = [_source(data).row(data.get(i, None)) for i in indices]
    with mock.patch.object(trainer, "eval_dataset", {"some": Dataset.from_list(rows)}):
        found = trainer.evaluate("some")  # by name, because TRL would prepare a data set argument again
    return {k.removeprefix("eval_"): float(v) for k, v in found.items() if k.startswith("eval_") and "per_second" not in k
            and not k.endswith(("runtime", "num_tokens")) and isinstance(v, (int, float))}  # fmt: skip


def _source(data: Data) -> Rows:
    while isinstance(data, View):
        data = data.data
    return cast(Rows, data)


def _train(cfg: config.Config, run: Run, stage: Hosted) -> None:
    """Run the trainer's loop with its evaluations."""
    val = stage.data["val"]

    def after(step: Step) -> None:
        if step.due(1):
            _measured(stage.trainer, val, range(min(SHOWN, len(val))))

    train(run, stage, after)
