"""Tokens and labels of a trainer of transformers or TRL: ends that are never scored, labels that are shifted twice, answers that are cut off,
a start of generation that training never saw, another vocabulary in the evaluation.

Trainers are known by their attributes: this room imports no library of trainers.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.modes import in_mode
from trainworthy.guard.measures.trainers.at_work import spread
from trainworthy.guard.measures.trainers.trainer_scores import causal, start_token

ROWS = 64
MOST_CUT, NEARLY_ALL, READ = 0.5, 0.9, 512  # of the answers; where none ends; rows that are read
MOST_MERGED = 0.5  # of the prompts
MOST_TURNED = 0.9  # of the conversations
HEADS = ("classifier", "score", "lm_head", "qa_outputs")
"""Last layers of the models of transformers; in some of them a module with several layers."""


def faults(trainer: Any, model: nn.Module, batch: dict, rows: dict) -> list[tuple[str, str]]:
    """Return every (what is wrong, its cause). `batch`: many samples, collated; `rows`: a few, of which the loss is computed."""
    found = [
        end_ignored(trainer, batch),
        masked(trainer, model, batch),
        shifted(trainer, model, rows),
        other_start(trainer, batch),
    ]
    found += [reread(trainer), cut_off(trainer), merged(trainer), turned(trainer), border(trainer), endless(trainer)]
    return [f for f in found if f]


def vocabulary(trainer: Any) -> Any:
    return trainer.processing_class if callable(trainer.processing_class) else None


def end_ignored(trainer: Any, batch: dict) -> tuple[str, str] | None:
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
            "the pad token is the end token, and the collator ignores both (DataCollatorForLanguageModeling): choose another pad token\n"
            "the chat template puts the end token behind its generation block")  # fmt: skip


def _some_rows(trainer: Any, needs: set[str], most: int) -> list[dict]:
    """Return about `most` rows, evenly spaced; none if they are packed or lack a column."""
    rows = trainer.train_dataset
    if getattr(trainer.args, "packing", False) or not needs <= set(getattr(rows, "column_names", None) or ()):
        return []
    return spread(rows, most)


def cut_off(trainer: Any) -> tuple[str, str] | None:
    """TRL's `max_length` takes the ends of answers, and the model never learns to end those. Only where a prompt is told from its answer."""
    longest, end = getattr(trainer.args, "max_length", None), getattr(trainer.processing_class, "eos_token_id", None)
    some = [] if longest is None else _some_rows(trainer, {"input_ids", "labels"}, READ)
    ends = sum(row["input_ids"][-1] == end for row in some)
    unended = [
        row for row in some if len(row["input_ids"]) == longest and row["labels"][0] < 0 and row["input_ids"][-1] != end
    ]
    if len(unended) > NEARLY_ALL * len(some):
        return (f"{len(unended):,} of {len(some):,} conversations are cut off at max_length={longest}, before the token that ends them",
                f"max_length={longest} is too short for nearly all conversations: their last answers are never trained")  # fmt: skip
    cut = sum(row["labels"][-1] >= 0 for row in unended)
    if not ends or cut <= MOST_CUT * len(some):
        return None
    return (f"{cut:,} of {len(some):,} answers are cut off at max_length={longest}, without the token that ends the others",
            f"max_length={longest} is too short for most prompts with their answers: their ends are never trained")  # fmt: skip


def merged(trainer: Any) -> tuple[str, str] | None:
    """The last token of a prompt is another one with its answer behind it: the text at the border is not scored, and generation begins with
    tokens that training never saw. TRL says so in a warning. Prompts of messages end with tokens of their own."""
    tokenize = vocabulary(trainer)
    some = [] if tokenize is None else _some_rows(trainer, {"prompt", "input_ids"}, ROWS)
    if not some or not all(isinstance(row["prompt"], str) for row in some):
        return None
    alone = [tokenize(text=row["prompt"])["input_ids"] for row in some]
    pairs = [(own, list(row["input_ids"])) for own, row in zip(alone, some, strict=True)]
    pairs = [(own, ids) for own, ids in pairs if 1 < len(own) <= len(ids)]
    merged = sum(ids[: len(own) - 1] == own[:-1] and ids[len(own) - 1] != own[-1] for own, ids in pairs)
    if merged <= MOST_MERGED * len(some):
        return None
    return (f"in {merged:,} of {len(some):,} rows the last token of the prompt changes when its answer follows",
            "the tokenizer joins the end of the prompt and the start of the answer: move the space between them to the answer's start")  # fmt: skip


def turned(trainer: Any) -> tuple[str, str] | None:
    """Conversations begin with the assistant and end with the user."""
    rows = trainer.train_dataset
    columns = getattr(rows, "column_names", None) or ()
    asked = next((c for c in ("messages", "prompt") if c in columns), None)
    answer = next((c for c in ("messages", "completion", "chosen") if c in columns), None)
    if asked is None or answer is None or not len(rows):
        return None
    some = spread(rows, ROWS)
    if not all(isinstance(r[c], list) and r[c] and isinstance(r[c][0], dict) for r in some for c in (asked, answer)):
        return None
    ends = [(r[asked][0].get("role"), r[answer][-1].get("role")) for r in some]
    count = sum(e == ("assistant", "user") for e in ends)
    if count < MOST_TURNED * len(ends):
        return None
    return (f"{count} of {len(ends)} conversations begin with the assistant and end with the user",
            "the roles were exchanged where the data were converted (human is the user, gpt the assistant)")  # fmt: skip


def _conversations(trainer: Any) -> list[list[dict]]:
    """Return some conversations that end with an answer; none without a template, or of data that have none."""
    rows, vocabulary = trainer.train_dataset, trainer.processing_class
    if not getattr(vocabulary, "chat_template", None) or "messages" not in (getattr(rows, "column_names", None) or ()):
        return []
    some = [row["messages"] for row in spread(rows, ROWS)]
    return [m for m in some if isinstance(m, list) and len(m) > 1 and m[-1].get("role") == "assistant"]


def border(trainer: Any) -> tuple[str, str] | None:
    """The text of the generation prompt begins the conversation's text, and its tokens do not: generation begins with tokens that training never
    saw there."""
    talks, tokenize = _conversations(trainer), vocabulary(trainer)
    render = None if tokenize is None else tokenize.apply_chat_template
    wrong = 0
    for talk in talks if render else ():
        before, whole = render(talk[:-1], tokenize=False, add_generation_prompt=True), render(talk, tokenize=False)
        if not whole.startswith(before):  # a template with another generation prompt on purpose
            return None
        first, ids = (tokenize(text=t, add_special_tokens=False)["input_ids"] for t in (before, whole))
        wrong += list(ids[: len(first)]) != list(first)
    if not talks or wrong <= MOST_MERGED * len(talks):
        return None
    return (f"in {wrong} of {len(talks)} conversations the tokens of the generation prompt change when an answer follows",
            "the tokenizer joins the end of the generation prompt and the start of the answer: end the prompt of the template where a token ends "
            "(no space behind it)")  # fmt: skip


def endless(trainer: Any) -> tuple[str, str] | None:
    """Conversations in which no token that ends generation is ever scored."""
    model, rows = trainer.accelerator.unwrap_model(trainer.model), trainer.train_dataset
    some = _some_rows(trainer, {"input_ids", "labels"}, ROWS) if _conversations(trainer) else []
    longest = getattr(trainer.args, "max_length", None) or len(rows) * 10**6
    whole = [row for row in some if len(row["input_ids"]) < longest and any(t >= 0 for t in row["labels"])]
    ends = _ends(trainer.processing_class) | _ends(getattr(model, "generation_config", None))
    if len(whole) < ROWS // 4 or not ends or any(ends & set(row["labels"]) for row in whole):
        return None
    last = trainer.processing_class.decode([next(t for t in reversed(whole[0]["labels"]) if t >= 0)])
    return (
        f"none of {len(whole)} conversations scores a token that ends generation ({', '.join(map(str, sorted(ends)))}); the last scored token of the "
        f"first is {last!r}",
        "the chat template ends its answers with a text that is no end token, or leaves it out of the generation block: the model never learns to "
        "stop\n"
        "the token that ends a turn is not the tokenizer's eos_token: SFTConfig(eos_token=...), and generation_config.eos_token_id",
    )


def _ends(config: Any) -> set[int]:
    found = getattr(config, "eos_token_id", None)
    return set(found) if isinstance(found, (list, tuple)) else {found} - {None}


def masked(trainer: Any, model: nn.Module, batch: dict) -> tuple[str, str] | None:
    """A model of the next token gets masked tokens, and is scored where they are."""
    mask = getattr(trainer.processing_class, "mask_token_id", None)
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if mask is None or not causal(model):
        return None
    if not isinstance(ids, Tensor) or not isinstance(labels, Tensor) or ids.shape != labels.shape:
        return None
    scored = labels >= 0
    hidden = float((ids == mask)[scored].float().mean()) if scored.any() else 0.0
    if hidden < 0.5 or float((ids == mask)[~scored].float().mean()) > 0.1:
        return None
    return (f"{hidden:.0%} of the scored positions hold the mask token, and the model predicts the next one",
            "DataCollatorForLanguageModeling masks tokens by default: mlm=False for a causal model")  # fmt: skip


def shifted(trainer: Any, model: nn.Module, batch: dict) -> tuple[str, str] | None:
    """The model gets labels that are those of the next place already."""
    seen: list[dict] = []
    if "labels" not in batch or not causal(model):
        return None

    def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(kwargs)

    noting = model.register_forward_pre_hook(note, with_kwargs=True)
    with noting, in_mode(model, training=False), torch.no_grad(), torch.random.fork_rng(devices=[]):
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
            return (f"{following:.0%} of the labels that the model gets are the token of the next position ({own:.0%} that of their own)",
                    "labels are shifted by hand, and the model shifts them again: give it labels at the position of their token")  # fmt: skip
    return None


def other_start(trainer: Any, batch: dict) -> tuple[str, str] | None:
    """Generation begins with another token than the decoder's inputs in training."""
    model, labels = trainer.accelerator.unwrap_model(trainer.model), batch.get("labels")
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not isinstance(labels, Tensor):
        return None
    if not hasattr(model, "generation_config"):
        return None
    inputs = batch.get("decoder_input_ids")
    if inputs is None and hasattr(model, "prepare_decoder_input_ids_from_labels"):
        inputs = model.prepare_decoder_input_ids_from_labels(labels=labels)
    first, start = (None if inputs is None else inputs[:, 0].unique().tolist()), start_token(trainer)
    if first is None or len(first) != 1 or start is None or start == first[0]:
        return None
    return (f"generation begins with token {start}, the decoder's inputs in training with token {first[0]}",
            "generation_config.decoder_start_token_id is not the model's config.decoder_start_token_id")  # fmt: skip


def reread(trainer: Any) -> tuple[str, str] | None:
    """The trainer's tokenizer makes the training tokens from the texts of the data set, and not those of the evaluation."""
    encode = vocabulary(trainer)
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


def _as_drawn(layer: nn.Linear, std: float | None) -> bool:
    """Whether a frozen layer is as transformers draws it: zeros and a normal distribution of the configured deviation."""
    if std is None or any(p.requires_grad for p in layer.parameters()) or layer.bias is None or bool(layer.bias.any()):
        return False
    spread, n = float(layer.weight.std()), layer.weight.numel()
    return abs(spread / std - 1) < 4 / (2 * n) ** 0.5 and len(Counter(layer.weight.flatten()[:64].tolist())) > 1


def frozen_head(trainer: Any) -> tuple[str, str] | None:
    """Last layers are frozen as they were drawn: a bias of zeros, weights of the configured deviation. peft keeps the frozen original of a
    layer that trains (`modules_to_save`)."""
    own: Any = getattr(trainer.model, "get_base_model", None)  # of peft
    model = own() if own else trainer.model
    std = getattr(getattr(model, "config", None), "initializer_range", None)
    drawn = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.split(".")[0] in HEADS and "original_module" not in n and _as_drawn(m, std)
    ]
    if not drawn:
        return None
    return (f"frozen at its random initial values: {', '.join(drawn)}",
            "the head of a new task was frozen with the rest: let it train (LoRA: modules_to_save or task_type)")  # fmt: skip
