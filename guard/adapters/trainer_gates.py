"""Gates that only trainers of transformers and TRL have: the metric, the tokens, a reference model without its adapter, a frozen head, the
rate over the run."""

from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor
from trainworthy.core.adapters.hosted import Hosted
from trainworthy.core.base.verdict import Fault, Finding, Skip
from trainworthy.core.gates.gate import GateContext, gate
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import Data
from trainworthy.guard.adapters import trainer_rates
from trainworthy.guard.adapters.class_weights import of_trainer
from trainworthy.guard.measures.losses import supervision
from trainworthy.guard.measures.trainers import (
    preferred_tokens,
    trainer_columns,
    trainer_counts,
    trainer_outputs,
    trainer_scores,
    trainer_tokens,
)
from transformers import Trainer

ROWS, FEW, COUNTED = 64, 8, 1000  # FEW: of which the loss is computed; COUNTED: whose classes are


def _rows(data: Any) -> list[dict]:
    chosen = data.representative(min(ROWS, len(data)))
    return [data.row(data.get(i, None)) for i in chosen]


@gate(
    "answers",
    rows="C4 C12",
    title="the metric is higher for the right answers than for wrong ones",
    reads="data evaluate metric",
    explains=True,
)
def answers(context: GateContext) -> Finding:
    """Give `compute_metrics` the labels as predictions, and then those of other classes or samples."""
    _, stage = context.look()
    trainer, data = stage.trainer, stage.data["val"]  # type: ignore[attr-defined]
    if fault := trainer_outputs.lost_rows(trainer) or trainer_outputs.cut_short(trainer):
        return Finding(False, fault[0], "outputs of every row, and answers as long as the labels", fault[1])
    if trainer.compute_metrics is None:
        raise Skip("no compute_metrics")
    if fault := trainer_scores.selection(trainer):
        return Finding(False, fault[0], "the best checkpoint has the highest accuracy, or the lowest error", fault[1])
    made = trainer_scores.answered(trainer)
    if made is None:
        found = trainer.predict(Dataset.from_list(_rows(data)))
        made = (found.predictions, found.label_ids)
    compared = trainer_scores.compared(trainer, *made)
    if compared is None:
        raise Skip("predictions, labels or metrics of a form that is not known here, or all labels alike")
    measured, cause = compared
    return Finding(not cause, measured, "a higher score for the labels themselves", cause)


def reachable(trainer: Trainer, batch: dict, name: str, goal: float) -> float:
    """Return the score of the right answers to this batch if it is below `goal`: eight samples without the class that F1 counts have
    an F1 of 0."""
    if trainer.compute_metrics is None or not trainer.args.greater_is_better:
        return goal
    with evaluating(trainer.model), torch.random.fork_rng(devices=[]):
        _, logits, labels = trainer.prediction_step(trainer.model, dict(batch["inputs"]), prediction_loss_only=False)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return goal
    known = labels.cpu().numpy()
    made = trainer_scores.as_predictions(trainer, logits.float().cpu().numpy(), known)
    if made is None:
        return goal
    return min(goal, trainer_scores.scored(trainer, made, known).get(name, goal))


@gate(
    "tokens",
    rows="C5 C7",
    title="labels fit the tokens: not shifted twice, ends learnt, one vocabulary",
    reads="data loss",
    explains=True,
)
def tokens(context: GateContext) -> Finding:
    """Read batches of both sets, and what the model gets of one of them."""
    _, stage = context.look()
    trainer = stage.trainer  # type: ignore[attr-defined]
    read = (trainer_columns.dropped, trainer_columns.told_apart, trainer_columns.contradicted,
            trainer_columns.misplaced, trainer_columns.spans_cut_off, trainer_columns.ambiguous, preferred_tokens.exchanged)  # fmt: skip
    wrong = [f for f in (measure(trainer) for measure in read) if f]
    data = stage.data["train"]
    known = getattr(trainer.processing_class, "eos_token_id", None) is not None or callable(trainer.processing_class)
    if not known and not wrong:
        raise Skip("no tokenizer")
    chosen = (data.representative(min(n, len(data))) for n in (ROWS, FEW))
    batch, rows = (dict(data.collate([data.get(i, None) for i in some])["inputs"]) for some in chosen)
    wrong += trainer_tokens.faults(trainer, stage.model, batch, rows) if known else []
    wrong += [f for f in (trainer_counts.dropped(trainer), _weighted(trainer, data)) if f]
    return Finding(
        not wrong, "; ".join(m for m, _ in wrong) or f"{len(batch)} entries of a batch fit each other",
        "the end of an answer is scored where texts end with it; labels are shifted once; generation begins as in training; both sets "
        "have one vocabulary; columns reach the model, and rewards and pairs are of their own rows",
        "\n".join(cause for _, cause in wrong),
    )  # fmt: skip


def _weighted(trainer: Trainer, data: Data) -> Fault | None:
    """Return what is wrong with the class weights of a loss that is one weighted cross-entropy."""
    weights = of_trainer(trainer, data)
    if weights is None:
        return None
    counted = data.collate([data.get(i, None) for i in data.representative(min(COUNTED, len(data)))])
    labels = counted["inputs"]["labels"].flatten()
    counts = labels[labels >= 0].cpu().bincount(minlength=len(weights))
    return supervision.class_weights([{"weight": weights.tolist(), "counts": counts.tolist(), "classes": len(weights)}])


@gate(
    "reference",
    rows="C9",
    title="the reference model does not train",
    reads="model loss optimizers train",
    explains=True,
)
def reference(context: GateContext) -> Finding:
    """Compare the model without its adapter before and after four rehearsed steps, on a batch of the validation set."""
    _, before = context.look()
    trainer = before.trainer  # type: ignore[attr-defined]
    if shared := trainer_outputs.shared_reference(trainer):
        return Finding(False, shared[0], "a reference model with tensors of its own", shared[1])
    if getattr(trainer, "ref_model", trainer) is not None or not hasattr(trainer.model, "disable_adapter"):
        raise Skip("no reference that is the model without its adapter")
    _, after, _ = rehearsed(context)
    data = before.data["val"]
    batch = data.collate([data.get(i, None) for i in data.representative(min(8, len(data)))])["inputs"]
    ids = {k: batch[k] for k in ("input_ids", "attention_mask") if k in batch}
    scores = []
    for stage in (before, after):
        model = stage.trainer.accelerator.unwrap_model(stage.model)  # type: ignore[attr-defined]
        here = {k: v.to(next(model.parameters()).device) for k, v in ids.items()}
        with evaluating(model), model.disable_adapter():
            scores.append(model(**here).logits.float())
    moved = float((scores[0] - scores[1]).abs().max())
    return Finding(
        moved < 1e-4 * float(scores[0].abs().max()), f"its scores change by at most {moved:.2g} in four steps",
        "the same scores: the reference is the model without its adapter, so weights outside of the adapter must be frozen",
        "requires_grad was set for the weights of the base, too; pass ref_model= if the base should train",
    )  # fmt: skip


@gate("head", rows="C9", title="a frozen last layer was trained before", reads="model", explains=True)
def head(context: GateContext) -> Finding:
    """Look for a last layer that is frozen as it was drawn: a bias of zeros, weights of the configured deviation."""
    stage = context.peek()
    trainer = stage.trainer  # type: ignore[attr-defined]
    if all(p.requires_grad for p in stage.model.parameters()):
        raise Skip("nothing is frozen")
    measured, cause = trainer_tokens.frozen_head(trainer) or ("no last layer is frozen at its initial values", "")
    return Finding(not cause, measured, "a last layer that trains, or that was loaded", cause)


@gate("rates", rows="C9 C11", title="the learning rate over the whole run", reads="optimizers")
def rates(context: GateContext) -> Finding:
    """Step the trainer's scheduler through the whole run, without training."""
    stage = cast(Hosted, context.peek())
    found, total = trainer_rates.over_the_run(stage.trainer, stage.epochs)
    fault = trainer_rates.fault(found, total, own=stage.trainer.lr_scheduler is None)
    measured, cause = fault or (f"{total:,} steps", "")
    needed = "a peak within the first 60% of the run, and at most half of the run near zero"
    return Finding(not cause, measured, needed, cause)


GATES = [answers, tokens, reference, head, rates]
