"""What a trainer of transformers or TRL does with the columns of its data set: those that it drops, pairs that an ending separates, and
rewards that belong to other rows."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.measures.trainers.at_work import spread

LIBRARIES = ("transformers", "peft", "trl", "diffusers", "sentence_transformers")
PLUMBING = {"labels", "label", "label_ids", "return_dict", "output_attentions", "output_hidden_states", "use_cache", "inputs_embeds", "input_ids",
            "past_key_values", "position_ids", "head_mask", "token_type_ids", "attention_mask", "cache_position", "num_items_in_batch",
            "return_loss"}  # fmt: skip
"""Arguments of `forward` that many models have and few callers give."""
PAIRS, ALIKE = 64, 0.99  # least number of pairs; share of them that one ending separates
FEWEST = 8  # spans
ANSWERS = 4  # least number of different answers under one ending
REWARDED = 12  # rows
SPANS, CUT, LOST = 256, 0.2, 0.02  # rows that are read; shares of spans at 0: of rows that are cut off, of shorter ones
MOST_ALIKE = 0.2  # of the rows
MOST_BOTH, READ = 0.3, 4000  # share of the pairs that are also there the other way round; pairs that are read


def dropped(trainer: Any) -> tuple[str, str] | None:
    """A column of numbers is no argument of the model's own `forward`, and an argument of it is left at its default."""
    rows, model = trainer.train_dataset, trainer.model
    columns = getattr(rows, "column_names", None)
    library = type(model).__module__.split(".")[0] in LIBRARIES
    if not isinstance(columns, list) or library or not getattr(trainer.args, "remove_unused_columns", False):
        return None
    if not len(rows):
        return None
    taken = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return None
    kept = trainer._remove_unused_columns(rows, "checked").column_names
    some = [rows[i] for i in range(min(32, len(rows)))]
    lost = [c for c in columns if c not in kept and numeric(some[0][c]) and not _numbers_rows(c, some)]
    given = set(columns) | set(trainer.data_collator([{k: v for k, v in r.items() if k in kept} for r in some[:2]]))
    left = [n for n, p in taken.items() if p.default is not p.empty and n not in given and n not in PLUMBING]
    if not lost or not left:
        return None
    return (f"the column '{lost[0]}' is dropped, and forward() gets no '{left[0]}'",
            f"the Trainer keeps the columns that forward() names: rename '{lost[0]}' to '{left[0]}', or set remove_unused_columns=False")  # fmt: skip


def numeric(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers_rows(column: str, rows: list[dict]) -> bool:
    """Return whether a column is the number of a row: no feature."""
    values = [r[column] for r in rows]
    named = column.lower() in ("id", "idx", "index") or column.lower().endswith(("_id", "_idx", "_index"))
    return named or (all(isinstance(v, int) for v in values) and len(set(values)) == len(values) > 8)


def told_apart(trainer: Any) -> tuple[str, str] | None:
    """All chosen answers end with one sign that no rejected one ends with."""
    rows, tokenizer = trainer.train_dataset, trainer.processing_class
    names = pair_columns(rows)
    decode = getattr(tokenizer, "decode", None)
    if names is None or decode is None or len(rows) < PAIRS:
        return None
    some = spread(rows, 256)
    ends = [[_last(r[n], tokenizer) for n in names] for r in some]
    first = [e[0][0] for e in ends]
    sign = max(set(first), key=first.count)
    alone = sum(e[0][0] == sign != e[1][0] for e in ends)
    bodies = {e[0][1] for e in ends if e[0][0] == sign}
    text = "" if sign is None else decode([sign]).strip()
    special = sign in (getattr(tokenizer, "all_special_ids", None) or ())
    wordlike = any(c.isalnum() for c in text.strip("<|>[]")) and not special
    if alone < ALIKE * len(ends) or len(bodies) < ANSWERS or wordlike:
        return None
    return (f"in {alone} of {len(ends)} pairs the chosen answer ends with {text!r}, and the rejected one does not",
            "one character separates chosen from rejected answers, so nothing else has to be learnt: end both alike")  # fmt: skip


def contradicted(trainer: Any) -> tuple[str, str] | None:
    """The same two texts are preferred in both orders: what decides between them is not in the pairs."""
    rows = trainer.train_dataset
    names = pair_columns(rows)
    if names is None or len(rows) < PAIRS:
        return None
    prompt = [c for c in ("prompt_ids", "prompt_input_ids") if c in rows.column_names][:1]
    pairs = [tuple(tuple(r[n]) for n in (*names, *prompt)) for r in (rows[i] for i in range(min(len(rows), READ)))]
    known = set(pairs)
    both = sum((b, a, *more) in known and a != b for a, b, *more in pairs)
    if both < MOST_BOTH * len(pairs):
        return None
    return (f"{both:,} of {len(pairs):,} pairs are also in the data the other way round",
            "the question is not part of the texts, so that the same two answers are preferred in both orders")  # fmt: skip


def ambiguous(trainer: Any) -> Fault | None:
    """Many rows that fill the whole length have the same tokens and other labels, and shorter ones do not: what tells them apart was cut off. Several
    answers to one text are no fault. Labels of a language model are its tokens."""
    rows = trainer.train_dataset
    if not {"input_ids", "labels"} <= set(getattr(rows, "column_names", None) or ()) or len(rows) < PAIRS:
        return None
    some = spread(rows, READ)
    if any(not isinstance(r["labels"], (int, list)) or r["labels"] == r["input_ids"] for r in some[:PAIRS]):
        return None
    answers: dict[tuple, list] = {}
    for r in some:
        answers.setdefault(tuple(r["input_ids"]), []).append(r["labels"])
    longest = max(map(len, answers))
    both = {k: len(found) for k, found in answers.items() if any(a != found[0] for a in found)}
    full, count = ({k: n for k, n in both.items() if len(k) == longest}, sum(both.values()))
    if count < MOST_ALIKE * len(some) or len(full) < FEWEST or sum(full.values()) < (1 - LOST) * count:
        return None
    return (
        f"{count:,} of {len(some):,} training rows have the same {longest} tokens as another row, and other labels; of shorter rows "
        f"{count - sum(full.values())}",
        f"the texts are cut off after {longest} tokens, before what tells them apart: raise max_length",
    )


def pair_columns(rows: Any) -> tuple[str, str] | None:
    """Return the columns of the tokens of chosen and rejected texts."""
    columns = set(getattr(rows, "column_names", None) or ())
    known = (("chosen_input_ids", "rejected_input_ids"), ("chosen_ids", "rejected_ids"))
    return next((n for n in known if set(n) <= columns), None)


def _last(ids: list[int], tokenizer: Any) -> tuple[int | None, tuple]:
    """Return the last token in front of a common end token, and the tokens before it."""
    end = getattr(tokenizer, "eos_token_id", None)
    while len(ids) > 1 and ids[-1] == end == ids[-2]:
        ids = ids[:-1]
    if ids and ids[-1] == end:
        ids = ids[:-1]
    return (ids[-1], tuple(ids[-4:-1])) if ids else (None, ())


def spans_cut_off(trainer: Any) -> Fault | None:
    """Questions and answers: the span of many rows that fill the whole length is the first token, and hardly any of shorter rows. Windows of one
    long text have spans at the first token in short rows, too."""
    rows = trainer.train_dataset
    columns = getattr(rows, "column_names", None) or ()
    if not {"start_positions", "input_ids", "attention_mask"} <= set(columns) or not len(rows):
        return None
    some = spread(rows, SPANS)
    longest = max(len(r["input_ids"]) for r in some)
    missing: dict[bool, list[bool]] = {True: [], False: []}
    for r in some:
        missing[sum(r["attention_mask"]) == longest].append(r["start_positions"] == 0)
    full, others = missing[True], missing[False]
    if not full or sum(full) < CUT * len(full) or sum(full) < FEWEST or sum(others) > LOST * len(others):
        return None
    return (
        f"{sum(full)} of {len(full)} rows of the whole length ({longest} tokens) have no answer in them, of the shorter ones {sum(others)} of "
        f"{len(others)}",
        "max_length cuts off the texts before their answers: raise it, or split the texts into windows (stride=, return_overflowing_tokens=True)",
    )


def misplaced(trainer: Any) -> tuple[str, str] | None:
    """A reward function gives the same rows other rewards where they come in another order. Groups of one prompt stay together."""
    rows, group = trainer.train_dataset, max(1, int(getattr(trainer, "num_generations", 0) or 1))
    columns, count = getattr(rows, "column_names", None), max(3, REWARDED // group)
    if not isinstance(columns, list) or "prompt" not in columns:
        return None
    if not hasattr(rows, "__getitem__") or len(rows) < count:
        return None
    some = [rows[i] for i in range(count) for _ in range(group)]
    order = [*range(group, len(some)), *range(group)]
    for function in getattr(trainer, "reward_funcs", None) or ():
        if isinstance(function, torch.nn.Module) or not callable(function) or inspect.iscoroutinefunction(function):
            continue
        for texts in _completions(some, columns, group):
            try:
                once, again, turned = (
                    rewards(function, some, texts, columns, o) for o in (range(len(some)),) * 2 + (order,)
                )
            except Exception:  # it needs completions of another form
                continue
            if once == again and len(set(once)) > 1 and None not in once and turned != [once[i] for i in order]:
                wrong = sum(a != once[i] for a, i in zip(turned, order, strict=True))
                return (f"{getattr(function, '__name__', 'a reward function')} gives {wrong} of {len(some)} answers another reward where the "
                        "prompts come in another order", "it looks rows up by their position in a batch: the trainer repeats and shuffles "
                        "prompts, and passes the columns of each row by name")  # fmt: skip
    return None


def _completions(rows: list[dict], columns: list[str], group: int) -> Iterable[list[str]]:
    """Yield texts as answers, from each column with a text or a number: of the row itself, and at each second place of another row."""
    for column in columns:
        if column != "prompt" and all(isinstance(r[column], (str, int, float)) for r in rows):
            own = [str(r[column]) for r in rows]
            yield own
            yield [own[(i + group) % len(own)] if i % 2 else text for i, text in enumerate(own)]


def rewards(function: Any, rows: list[dict], texts: list[str], columns: list[str], order: Iterable[int]) -> list:
    """Return what a reward function of TRL gives answers in this order."""
    order = list(order)
    talk = isinstance(rows[0]["prompt"], list)
    answers = [[{"role": "assistant", "content": texts[i]}] if talk else texts[i] for i in order]
    more = {c: [rows[i][c] for i in order] for c in columns if c != "prompt"}
    ids = [[ord(c) for c in texts[i]] for i in order]
    return list(function(prompts=[rows[i]["prompt"] for i in order], completions=answers, completion_ids=ids, **more))
