"""The metric of a trainer of transformers: what `compute_metrics` gives the right answers, and whether the best checkpoint is the best one.

Trainers are known by their attributes: this room imports no library of trainers.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainworthy.core.base.modes import in_mode
from trainworthy.core.base.names import more_is_better
from trainworthy.guard.measures.trainers.at_work import spread

NAMES = ("accuracy", "f1", "exact_match", "precision", "recall")
"""Metrics of which more is better, where the trainer does not name one."""
ENOUGH = 0.95
"""Least score of right answers to rows in which every class occurs."""
PERFECT = 0.98
"""Least accuracy of right answers to labels of which some are left out."""
SURE = 10.0
ROWS, MOST = 64, 20_000_000  # rows that are answered; numbers that their outputs may have


def selection(trainer: Any) -> tuple[str, str] | None:
    """The best checkpoint is chosen by the lowest accuracy or the highest error."""
    args = trainer.args
    name, greater = getattr(args, "metric_for_best_model", None), getattr(args, "greater_is_better", None)
    if not isinstance(name, str) or greater is None or more_is_better(name) in (None, bool(greater)):
        return None
    return (
        f"of '{name}' the {'highest' if greater else 'lowest'} counts as the best",
        f"greater_is_better={greater} for {name}: the worst checkpoint is kept, and early stopping waits for a worse one"
        + ("" if greater is False else " (without greater_is_better, more is better of all names but '...loss')"),
    )


def causal(model: nn.Module) -> bool:
    """Return whether a model's output at a place is for the next token."""
    own: Any = getattr(model, "get_base_model", None)  # of peft
    name = type(own() if own else model).__name__
    return "ForCausalLM" in name or "LMHeadModel" in name


def start_token(trainer: Any) -> int | None:
    own = trainer.model.generation_config
    return own.decoder_start_token_id if own.decoder_start_token_id is not None else own.bos_token_id


def as_predictions(trainer: Any, like: Any, labels: Any) -> np.ndarray | None:
    """Return `labels` in the form of the predictions `like`: classes, logits, probabilities of several labels, numbers, or generated
    tokens; None for other forms."""
    if not isinstance(labels, np.ndarray) or not isinstance(like, np.ndarray):
        return None
    if not np.issubdtype(labels.dtype, np.integer):
        return _floats(like, labels)
    if getattr(trainer.args, "predict_with_generate", False):
        start, pad = start_token(trainer), getattr(trainer.processing_class, "pad_token_id", None)
        if start is None or pad is None or labels.ndim != 2:
            return None
        return np.concatenate([np.full_like(labels[:, :1], start), np.where(labels < 0, pad, labels)], axis=1)
    known = np.maximum(labels, 0)
    if causal(trainer.accelerator.unwrap_model(trainer.model)):
        if labels.ndim != 2 or like.ndim < 2 or like.shape[:2] != labels.shape:
            return None
        known = np.concatenate([known[:, 1:], np.zeros_like(known[:, :1])], axis=1)
    if like.shape == known.shape and np.issubdtype(like.dtype, np.integer):
        return known
    if like.ndim == known.ndim + 1 and like.shape[:-1] == known.shape and like.shape[-1] > known.max():
        return np.eye(like.shape[-1], dtype=like.dtype)[known]
    return None


def _floats(like: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Return several labels a row as logits or probabilities, and numbers as they are."""
    if like.size != labels.size or len(like) != len(labels) or not np.issubdtype(like.dtype, np.floating):
        return None
    if several(labels):
        sure = labels.astype(like.dtype)
        return 0.0001 + 0.9998 * sure if ((like >= 0) & (like <= 1)).all() else SURE * (2 * sure - 1)
    return labels.reshape(like.shape).astype(like.dtype)


def several(labels: np.ndarray) -> bool:
    """Return whether labels are zeros and ones, several a row."""
    return bool(labels.ndim == 2 and labels.shape[1] > 1 and np.issubdtype(labels.dtype, np.floating)
                and ((labels == 0) | (labels == 1)).all())  # fmt: skip


def others(labels: np.ndarray) -> np.ndarray:
    """Return wrong labels: of each row another row's, or of each place another class."""
    if not np.issubdtype(labels.dtype, np.integer):
        return 1 - labels if several(labels) else np.roll(labels, len(labels) // 2, axis=0)
    classes = int(labels.max()) + 1
    return np.roll(labels, 1, axis=0) if classes > len(labels) else np.where(labels < 0, labels, (labels + 1) % classes)


def numbers(found: dict) -> dict[str, float]:
    return {k.removeprefix("eval_"): float(v) for k, v in found.items() if isinstance(v, (int, float, np.number))}


def scored(trainer: Any, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return what `compute_metrics` gives these outputs of the model, or these generated tokens."""
    before = trainer.preprocess_logits_for_metrics
    if before is not None and not getattr(trainer.args, "predict_with_generate", False):
        predictions = before(torch.from_numpy(predictions), torch.from_numpy(labels)).numpy()
    return numbers(
        trainer.compute_metrics(sys.modules["transformers"].EvalPrediction(predictions=predictions, label_ids=labels))
    )


def compared(trainer: Any, like: Any, labels: Any) -> tuple[str, str] | None:
    """Return (what `compute_metrics` gives right and wrong answers, the cause if that is a fault); None where nothing is known."""
    right = as_predictions(trainer, like, labels)
    if right is None or len(np.unique(labels[labels >= 0] if np.issubdtype(labels.dtype, np.integer) else labels)) < 2:
        return None
    best = scored(trainer, right, labels)
    if not np.issubdtype(labels.dtype, np.integer) and not several(labels):
        return _of_numbers(trainer, best, like, labels)
    chosen = (getattr(trainer.args, "metric_for_best_model", None) or "").removeprefix("eval_")
    if not (chosen in best and trainer.args.greater_is_better and more_is_better(chosen) is not False):
        chosen = ""
    names = [chosen] if chosen else [n for n in NAMES if n in best]
    if not names:
        return None
    wrong_answers = as_predictions(trainer, like, others(labels))
    worse = scored(trainer, wrong_answers, labels) if wrong_answers is not None else {}
    both = (f"{n} {best[n]:.3f} for the labels themselves, {worse.get(n, 0.0):.3f} for other ones" for n in names)
    measured = f"{', '.join(both)}, on {len(labels)} samples"
    if np.issubdtype(labels.dtype, np.integer) and causal(trainer.accelerator.unwrap_model(trainer.model)):
        same = scored(trainer, _unshifted(like, labels), labels)
        if any(same.get(n, 0.0) > max(best[n], ENOUGH) for n in names):
            return (f"{names[0]} {best[names[0]]:.3f} where each position predicts the next token, "
                    f"{same[names[0]]:.3f} where it repeats its own",
                    "predictions are for the next token: compute_metrics must compare predictions[:, :-1] with labels[:, 1:]")  # fmt: skip
    if not any(best[n] > worse.get(n, 0.0) for n in names):
        return measured, ("compute_metrics takes the argmax of predictions that are classes or generated tokens already\n"
                          "compute_metrics compares with other labels, or with labels in another order")  # fmt: skip
    left_out = not several(labels) and np.issubdtype(labels.dtype, np.integer) and (labels < 0).any()
    if left_out and best.get("accuracy", 1.0) < PERFECT:
        return (f"accuracy {best['accuracy']:.3f} for the labels themselves, of which {float((labels < 0).mean()):.0%} are -100",
                "compute_metrics scores the positions that are left out (-100), or leaves out a class: its mask must be labels != -100")  # fmt: skip
    if several(labels) and _all_occur(labels) and all(best[n] < ENOUGH for n in names):
        return (f"the labels themselves get {', '.join(f'{n} {best[n]:.3f}' for n in names)}",
                "several labels of a row can hold: compute_metrics needs a sigmoid and a threshold for each, no softmax or argmax")  # fmt: skip
    return measured, ""


def _unshifted(like: np.ndarray, labels: np.ndarray) -> np.ndarray:
    known = np.maximum(labels, 0)
    return known if like.ndim == 2 else np.eye(like.shape[-1], dtype=like.dtype)[known]


def _all_occur(labels: np.ndarray) -> bool:
    """Return whether each of several labels holds for some rows and not for others."""
    share = labels.mean(axis=0)
    return bool(((share > 0) & (share < 1)).all())


def _of_numbers(trainer: Any, best: dict[str, float], like: np.ndarray, labels: np.ndarray) -> tuple[str, str] | None:
    """Return the same for numbers: errors of right answers are 0, R2 and correlations are 1."""
    far = as_predictions(trainer, like, others(labels))
    worse = scored(trainer, far, labels) if far is not None else {}
    known = {n: more_is_better(n) for n in best if n != "loss" and n in worse}
    bad = [n for n, up in known.items() if up is False and worse[n] > 0 and best[n] > 0.2 * worse[n]]
    of_one = [n for n, up in known.items() if up and n.lower().removeprefix("eval_") in ("r2", "pearson", "spearman")]
    bad += [n for n in of_one if best[n] < 0.8]
    if not any(up is not None for up in known.values()):
        return None
    measured = ", ".join(f"{n} {best[n]:.3g}" for n in known if known[n] is not None) + " for the targets themselves"
    cause = "compute_metrics scales predictions and targets back differently, or compares them in another order"
    return (measured, cause if bad else "")


def answered(trainer: Any) -> tuple[Any, Any] | None:
    """Return (outputs of the model, labels) of some rows of the evaluation; None where they cannot be had."""
    data, args = trainer.eval_dataset, trainer.args
    data = next(iter(data.values()), None) if isinstance(data, Mapping) and not hasattr(data, "column_names") else data
    unusual = getattr(args, "batch_eval_metrics", False) or getattr(args, "include_for_metrics", None)
    if trainer.compute_metrics is None or unusual or getattr(args, "predict_with_generate", False):
        return None
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or not len(data):
        return None
    named = hasattr(data, "column_names")
    rows = trainer._remove_unused_columns(data, "evaluation") if named else data
    collate = trainer.data_collator if named else trainer._get_collator_with_removed_columns(trainer.data_collator)
    first = _predicted(trainer, collate([rows[0]]))
    count = min(ROWS, len(rows), MOST // max(1, first[2])) if first else 0
    if count < 8:
        return None
    found = _predicted(trainer, collate(spread(rows, count)[:count]))
    return found[:2] if found else None


def _predicted(trainer: Any, batch: dict) -> tuple[np.ndarray, np.ndarray, int] | None:
    """Return the model's outputs and the labels of a batch, and how many numbers the outputs have."""
    with in_mode(trainer.model, training=False), torch.no_grad(), torch.random.fork_rng():
        _, logits, labels = trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=False)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return None
    plain = logits.float() if logits.is_floating_point() else logits  # numpy has no bfloat16
    return plain.cpu().numpy(), labels.cpu().numpy(), logits.numel()
