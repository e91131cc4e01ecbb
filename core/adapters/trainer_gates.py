"""Gates that only trainers of transformers and TRL have: the metric, the tokens, a reference model without its adapter, a frozen head."""

from collections import Counter
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates.gate import GateContext, gate
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import evaluating
from transformers import EvalPrediction, Trainer

ROWS, FEW = 64, 8  # FEW: of which the loss is computed
MOST_DROPPED = 0.1  # of the rows; the few longest prompts of a data set may be dropped on purpose
MOST_CUT, READ = 0.5, 512  # of the answers; rows that are read
MOST_MERGED = 0.5  # of the prompts
NAMES = ("accuracy", "f1", "exact_match", "precision", "recall")
"""Metrics of which more is better, where the trainer does not say which one counts."""
HEADS = ("classifier", "score", "lm_head", "qa_outputs")
"""Last layers of the models of transformers; in some of them a module with several layers."""


def _adapted(trainer: Trainer) -> bool:
    """Whether the trainer's reference is its own model with the adapter switched off."""
    return getattr(trainer, "ref_model", trainer) is None and hasattr(trainer.model, "disable_adapter")


def _rows(data: Any, count: int = ROWS) -> list[dict]:
    chosen = data.representative(min(count, len(data)))
    return [data.row(data.get(i, None)) for i in chosen]


@gate(
    "answers",
    rows="C4 C12",
    title="the metric is higher for the right answers than for wrong ones",
    reads="data evaluate metric",
)
def answers(context: GateContext) -> Finding:
    """Give `compute_metrics` the labels as predictions, and then those of other classes or samples."""
    _, stage = context.look()
    trainer, data = stage.trainer, stage.data["val"]  # type: ignore[attr-defined]
    if trainer.compute_metrics is None:
        raise Skip("no compute_metrics")
    found = trainer.predict(Dataset.from_list(_rows(data)))
    labels, like = found.label_ids, found.predictions
    if as_predictions(trainer, like, labels) is None or len(np.unique(labels[labels >= 0])) < 2:
        raise Skip("predictions or labels of a form that is not known here, or all labels alike")
    made = [as_predictions(trainer, like, some) for some in (labels, _others(labels))]
    scores = [_numbers(trainer.compute_metrics(EvalPrediction(predictions=p, label_ids=labels))) for p in made]
    chosen = (trainer.args.metric_for_best_model or "").removeprefix("eval_")
    names = [chosen] if chosen in scores[0] and trainer.args.greater_is_better else [n for n in NAMES if n in scores[0]]
    if not names:
        raise Skip("no metric of which more is known to be better")
    right, wrong = ({n: s.get(n, 0.0) for n in names} for s in scores)
    ok = any(right[n] > wrong[n] for n in names)
    measured = ", ".join(f"{n} {right[n]:.3f} for the labels themselves, {wrong[n]:.3f} for other ones" for n in names)
    return Finding(
        ok, f"{measured}, on {len(labels)} samples", "a higher score for the labels themselves",
        "compute_metrics takes the argmax of predictions that are classes or generated tokens already\n"
        "compute_metrics compares with other labels, or with labels in another order",
    )  # fmt: skip


def _numbers(found: dict) -> dict[str, float]:
    return {k.removeprefix("eval_"): float(v) for k, v in found.items() if isinstance(v, (int, float, np.number))}


def _others(labels: np.ndarray) -> np.ndarray:
    """Return wrong labels: of each row another row's, or of each place another class."""
    classes = int(labels.max()) + 1
    return np.roll(labels, 1, axis=0) if classes > len(labels) else np.where(labels < 0, labels, (labels + 1) % classes)


def as_predictions(trainer: Trainer, like: Any, labels: Any) -> np.ndarray | None:
    """Return `labels` in the form of the predictions `like`: classes, logits, or generated tokens; None for other forms."""
    if (
        not isinstance(labels, np.ndarray)
        or not isinstance(like, np.ndarray)
        or not np.issubdtype(labels.dtype, np.integer)
    ):
        return None
    if getattr(trainer.args, "predict_with_generate", False):
        start, pad = _start(trainer), _pad(trainer)
        if start is None or pad is None or labels.ndim != 2:
            return None
        return np.concatenate([np.full_like(labels[:, :1], start), np.where(labels < 0, pad, labels)], axis=1)
    if _causal(trainer.accelerator.unwrap_model(trainer.model)):
        return None  # logits at a place are for the next label
    known = np.maximum(labels, 0)
    if like.shape == labels.shape and np.issubdtype(like.dtype, np.integer):
        return known
    if like.ndim == labels.ndim + 1 and like.shape[:-1] == labels.shape and like.shape[-1] > known.max():
        return np.eye(like.shape[-1], dtype=like.dtype)[known]
    return None


def reachable(trainer: Trainer, batch: dict, name: str, goal: float) -> float:
    """Return the score of the right answers to this batch if it is below `goal`: eight samples without the class that F1 counts have
    an F1 of 0."""
    pre = trainer.preprocess_logits_for_metrics
    if trainer.compute_metrics is None or not trainer.args.greater_is_better:
        return goal
    with evaluating(trainer.model), torch.random.fork_rng(devices=[]):
        _, logits, labels = trainer.prediction_step(trainer.model, dict(batch["inputs"]), prediction_loss_only=False)
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        return goal
    like = (pre(logits, labels) if pre else logits.float()).cpu().numpy()
    known = labels.cpu().numpy()
    made = as_predictions(trainer, like, known)
    if made is None:
        return goal
    return min(
        goal, _numbers(trainer.compute_metrics(EvalPrediction(predictions=made, label_ids=known))).get(name, goal)
    )


def _start(trainer: Trainer) -> int | None:
    own = trainer.model.generation_config
    return own.decoder_start_token_id if own.decoder_start_token_id is not None else own.bos_token_id


def _pad(trainer: Trainer) -> int | None:
    return getattr(trainer.processing_class, "pad_token_id", None)


@gate(
    "tokens",
    rows="C5 C7",
    title="labels fit the tokens: not shifted twice, ends learnt, one vocabulary",
    reads="data loss",
)
def tokens(context: GateContext) -> Finding:
    """Read batches of both sets, and what the model gets of one of them."""
    _, stage = context.look()
    trainer = stage.trainer  # type: ignore[attr-defined]
    if getattr(trainer.processing_class, "eos_token_id", None) is None and _vocabulary(trainer) is None:
        raise Skip("no tokenizer")
    data = stage.data["train"]
    batch, rows = (
        dict(data.collate([data.get(i, None) for i in data.representative(min(n, len(data)))])["inputs"])
        for n in (ROWS, FEW)
    )
    faults = [
        _end_ignored(trainer, batch),
        _shifted(trainer, stage.model, rows),
        _other_start(trainer, batch),
        _reread(trainer),
    ]
    wrong = [f for f in [*faults, _dropped(trainer), _cut_off(trainer), _merged(trainer)] if f]
    return Finding(
        not wrong, "; ".join(m for m, _ in wrong) or f"{len(batch)} entries of a batch fit each other",
        "the end of an answer is scored where texts end with it; labels are shifted once; generation begins as in training; both sets "
        "have one vocabulary",
        "\n".join(cause for _, cause in wrong),
    )  # fmt: skip


def _vocabulary(trainer: Trainer) -> Any:
    return trainer.processing_class if callable(trainer.processing_class) else None


def _end_ignored(trainer: Trainer, batch: dict) -> tuple[str, str] | None:
    """The last token of most texts is the end token, and no label is."""
    ids, labels, mask = batch.get("input_ids"), batch.get("labels"), batch.get("attention_mask")
    end = getattr(trainer.processing_class, "eos_token_id", None)
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or not isinstance(mask, Tensor) or end is None:
        return None
    if not ids.shape == labels.shape == mask.shape:
        return None
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    last = places.masked_fill(mask == 0, -1).max(dim=1, keepdim=True).values.clamp(min=0)
    ends = int((ids.gather(1, last) == end).sum())
    if ends < 0.8 * len(ids) or bool((labels == end).any()) or not bool((labels >= 0).any()):
        return None
    return (f"{ends} of {len(ids)} texts end with the token {end}, and none of these ends is scored",
            "the pad token is the end token, and the collator ignores both (DataCollatorForLanguageModeling): choose another pad token")  # fmt: skip


def _dropped(trainer: Trainer) -> tuple[str, str] | None:
    """TRL drops rows whose answer is cut off, with no more than a progress bar."""
    for what, before, after in getattr(trainer, "dropped_rows", ()):
        if before - after > MOST_DROPPED * before:
            return (f"{before - after:,} of {before:,} rows are left out ({what[0].lower()}{what[1:]})",
                    f"max_length={getattr(trainer.args, 'max_length', None)} is too short for these prompts with their answers")  # fmt: skip
    return None


def _some_rows(trainer: Trainer, needs: set[str], most: int) -> list[dict]:
    """Return about `most` rows, evenly spaced; none if they are packed or lack a column."""
    rows = trainer.train_dataset
    if getattr(trainer.args, "packing", False) or not needs <= set(getattr(rows, "column_names", None) or ()):
        return []
    return [rows[i] for i in range(0, len(rows), max(1, len(rows) // most))]


def _cut_off(trainer: Trainer) -> tuple[str, str] | None:
    """TRL's `max_length` takes the ends of answers, and the model never learns to end those. Only where a prompt is told from its answer."""
    longest, end = getattr(trainer.args, "max_length", None), getattr(trainer.processing_class, "eos_token_id", None)
    some = [] if longest is None else _some_rows(trainer, {"input_ids", "labels"}, READ)
    ends = sum(row["input_ids"][-1] == end for row in some)
    cut = sum(
        len(row["input_ids"]) == longest and row["labels"][0] < 0 <= row["labels"][-1] and row["input_ids"][-1] != end
        for row in some
    )
    if not ends or cut <= MOST_CUT * len(some):
        return None
    return (f"{cut:,} of {len(some):,} answers are cut off at max_length={longest}, without the token that ends the others",
            f"max_length={longest} is too short for most prompts with their answers: their ends are never trained")  # fmt: skip


def _merged(trainer: Trainer) -> tuple[str, str] | None:
    """The last token of a prompt is another one with its answer behind it: the text at the border is not scored, and generation begins with
    tokens that training never saw. TRL says so in a warning. Prompts of messages end with tokens of their own."""
    tokenize = _vocabulary(trainer)
    some = [] if tokenize is None else _some_rows(trainer, {"prompt", "input_ids"}, ROWS)
    if not some or not all(isinstance(row["prompt"], str) for row in some):
        return None
    alone = [tokenize(text=row["prompt"])["input_ids"] for row in some]
    pairs = [
        (own, list(row["input_ids"]))
        for own, row in zip(alone, some, strict=True)
        if 1 < len(own) <= len(row["input_ids"])
    ]
    merged = sum(ids[: len(own) - 1] == own[:-1] and ids[len(own) - 1] != own[-1] for own, ids in pairs)
    if merged <= MOST_MERGED * len(some):
        return None
    return (f"in {merged:,} of {len(some):,} rows the last token of the prompt is another one with its answer behind it",
            "the tokenizer joins the end of the prompt and the start of the answer: move the space between them to the answer's start")  # fmt: skip


def _shifted(trainer: Trainer, model: nn.Module, batch: dict) -> tuple[str, str] | None:
    """The model gets labels that are those of the next place already."""
    seen: list[dict] = []
    if "labels" not in batch or not _causal(model):
        return None

    def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(kwargs)

    noting = model.register_forward_pre_hook(note, with_kwargs=True)
    with noting, evaluating(model), torch.random.fork_rng(devices=[]):
        seeds.seed_all(0)
        trainer.compute_loss(model, trainer._prepare_inputs(dict(batch)))
    for kwargs in seen:
        ids, labels = kwargs.get("input_ids"), kwargs.get("labels")
        if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.shape != labels.shape or ids.dim() != 2:
            continue
        scored = labels >= 0
        if scored.sum() < 16:
            continue
        own = float((labels == ids)[scored].float().mean())
        following = float((labels[:, :-1] == ids[:, 1:])[scored[:, :-1]].float().mean())
        if following > 0.95 and own < 0.5:
            return (f"{following:.0%} of the labels that the model gets are the token of the next place ({own:.0%} that of their own)",
                    "labels are shifted by hand, and the model shifts them again: give it labels at the place of their token")  # fmt: skip
    return None


def _causal(model: nn.Module) -> bool:
    own: Any = getattr(model, "get_base_model", None)  # of peft
    inner = own() if own else model
    return "ForCausalLM" in type(inner).__name__ or "LMHeadModel" in type(inner).__name__


def _other_start(trainer: Trainer, batch: dict) -> tuple[str, str] | None:
    """Generation begins with another token than the decoder's inputs in training."""
    model, labels = trainer.accelerator.unwrap_model(trainer.model), batch.get("labels")
    config = getattr(model, "config", None)
    if (
        not getattr(config, "is_encoder_decoder", False)
        or not isinstance(labels, Tensor)
        or not hasattr(model, "generation_config")
    ):
        return None
    inputs = batch.get("decoder_input_ids")
    if inputs is None and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        inputs = model.prepare_decoder_input_ids_from_labels(labels=labels)
    first, start = (None if inputs is None else inputs[:, 0].unique().tolist()), _start(trainer)
    if first is None or len(first) != 1 or start is None or start == first[0]:
        return None
    return (f"generation begins with token {start}, the decoder's inputs in training with token {first[0]}",
            "generation_config.decoder_start_token_id is not the model's config.decoder_start_token_id")  # fmt: skip


def _reread(trainer: Trainer) -> tuple[str, str] | None:
    """The trainer's tokenizer makes the training tokens from the texts of the data set, and not those of the evaluation."""
    encode = _vocabulary(trainer)
    sets = (trainer.train_dataset, trainer.eval_dataset)
    if encode is None or any("input_ids" not in (getattr(d, "column_names", None) or ()) for d in sets):
        return None
    for column in sets[0].column_names:
        shares = [_as_encoded(encode, d, column) for d in sets]
        if shares[0] > 0.9 and shares[1] < 0.1:
            return (f"the tokenizer makes the training tokens from '{column}' ({shares[0]:.0%} of rows), and not the evaluation's "
                    f"({shares[1]:.0%})", "the evaluation's texts were encoded with another tokenizer or vocabulary")  # fmt: skip
    return None


def _as_encoded(encode: Any, data: Any, column: str) -> float:
    rows = [data[i] for i in range(min(16, len(data)))]
    if column not in rows[0] or not isinstance(rows[0][column], str):
        return 0.5
    made = [encode(r[column], truncation=True)["input_ids"] for r in rows]
    return float(np.mean([list(m) == list(r["input_ids"]) for m, r in zip(made, rows, strict=True)]))


@gate("reference", rows="C9", title="the reference model does not train", reads="model loss optimizers train")
def reference(context: GateContext) -> Finding:
    """Compare the model without its adapter before and after four rehearsed steps, on a batch of the validation set."""
    _, before = context.look()
    if not _adapted(before.trainer):  # type: ignore[attr-defined]
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
        "requires_grad was set for the weights of the base too; or pass ref_model=, if the base is to be trained",
    )  # fmt: skip


@gate("head", rows="C9", title="a frozen last layer was trained before", reads="model")
def head(context: GateContext) -> Finding:
    """Look for a last layer that is frozen as it was drawn: a bias of zeros, weights of the configured deviation."""
    stage = context.peek()
    own: Any = getattr(stage.model, "get_base_model", None)  # of peft
    model = own() if own else stage.model
    if all(p.requires_grad for p in model.parameters()):
        raise Skip("nothing is frozen")
    std = getattr(getattr(model, "config", None), "initializer_range", None)
    drawn = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.split(".")[0] in HEADS and _as_drawn(m, std)
    ]
    return Finding(
        not drawn, f"frozen as drawn: {', '.join(drawn)}" if drawn else "no last layer is frozen as it was drawn",
        "a last layer that trains, or that was loaded",
        "the head of a new task was frozen with the rest: let it train (LoRA: modules_to_save or task_type)",
    )  # fmt: skip


def _as_drawn(layer: nn.Linear, std: float | None) -> bool:
    """Whether a frozen layer is as transformers draws it: zeros and a normal distribution of the configured deviation."""
    if std is None or any(p.requires_grad for p in layer.parameters()) or layer.bias is None or bool(layer.bias.any()):
        return False
    spread, n = float(layer.weight.std()), layer.weight.numel()
    return abs(spread / std - 1) < 4 / (2 * n) ** 0.5 and len(Counter(layer.weight.flatten()[:64].tolist())) > 1


GATES = [answers, tokens, reference, head]
