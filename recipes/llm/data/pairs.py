"""Prompts with the completion that is wanted: where they come from, and how a chat model reads one."""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trainworthy.core.data.validation_split import hold_out, parse_share, refuse_training_data
from trainworthy.recipes.llm.data import column_names, docstrings, files, formats, mixture, prepared, templates
from trainworthy.recipes.llm.data.chats import COLUMNS, IGNORED, Chat, any_conversation
from trainworthy.recipes.llm.evaluation import metrics
from trainworthy.recipes.shared import hub

from trainworthy import core

__all__ = ["COLUMNS", "IGNORED", "Chat", "Pairs", "Source"]

VALIDATION = files.VALIDATION
LONG = 12  # letters of an answer that no question ends with by itself
ECHO = 8  # letters of a prompt, from which an answer that begins with it repeats it
LEAST = 32  # rows of a test set; of fewer there is none
COLLECTIONS, LEAST_EACH = 30, 10  # values of `source`, and rows of each on average, that name data sets
FEW = 5  # rows of a split; of fewer none may be left out
LONGER = 0.01  # of the rows may be longer than the length that is chosen for them
ROUND = 32  # a limit that follows the data is a multiple of this
SYSTEM = "You name Python functions."  # for docstrings


@dataclass(unsafe_hash=True)
class Source:
    """Where the pairs come from."""

    path: str = "docstrings"
    """`docstrings` (the standard library's), a .jsonl, .json, .csv or .parquet file, or `hub:owner/name`: `prompt` and
    `completion`, OpenAI's `messages` (and `tools`), ShareGPT, Alpaca; a column `source`, if there is one, is what the split must
    not cut through. Several with commas between them, a weight behind `*`: `a.jsonl,b.jsonl*2,hub:owner/name*0.5`."""
    val: str = ""
    """Validation rows: a file like those of `path`, or a share of the rows (`0.1`); empty: the data set's own split, else 0.05."""
    columns: str = ""
    """Names of columns that are called otherwise in the files: `prompt=question,completion=answer`."""
    system: str = "auto"
    """System turn of every chat; empty: none (some templates then put their own). `auto`: the task for docstrings, else none."""
    max_length: int = 0
    """Tokens of prompt and completion together; 0: as few as leave out no more than 1% of the rows, or `max_bad` if less (docstrings: 96)."""
    max_bad: float = 0.01
    """Share of rows that may be longer or unusable (no answer, not text); they are left out, counted and named, never cut."""
    held_out: int = 128
    """Validation pairs that are read, evenly spaced: generating answers takes its time. 0: all there are."""
    every_turn: bool = True
    """Score every answer of a conversation; no: the last one alone."""
    near: float = 0.8
    """A pair of a file goes if an earlier one has this share of its words, in runs of four; 1: only equal pairs go; 0: none."""

    def __post_init__(self):
        self.path = mixture.absolute(self.path)  # resumable from any folder
        self.val = hub.absolute(self.val)


def chat(tokenizer: Any, source: Source) -> Chat:
    """Return the renderer of rows of `source` with this tokenizer's template."""
    paths = [path for path, _ in mixture.weighted_paths(source.path) if path != "docstrings"]
    found = (tables(path, source.columns)["train"] for path in paths)
    return Chat(
        tokenizer,
        formats.system(source.system, source.path, SYSTEM),
        any(any_conversation(rows) for rows in found),
        source.every_turn,
    )


Rows = list[dict[str, str]]


def read(source: Source, chat: Chat) -> tuple[Rows, Rows, Rows, list[str]]:
    """(train rows of `prompt`, `completion` and `source`, val rows, test rows, what to say of what was left out or repeated). They are
    prepared once per process, and many of them once on this machine."""
    return fresh(_read(source, chat))


def fresh(found: tuple) -> tuple:
    """Rows of several splits, copied: a build of a stage may change its own."""
    *splits, notes = found
    return *([dict(row) for row in rows] for rows in splits), list(notes)


@lru_cache(4)
def _read(source: Source, chat: Chat) -> tuple[Rows, Rows, Rows, list[str]]:
    paths = [path for path, _ in mixture.weighted_paths(source.path)]
    return from_files("pairs", paths, source, chat, lambda: _sorted_out(source, chat))


def from_files(name: str, paths: list[str], source: Any, chat: Chat, make: Callable[[], Any]) -> Any:
    """Return what `make` makes of the rows of `paths` and `source.val` as `chat` renders them, kept on this disk if they are many."""
    if "docstrings" in paths:
        return make()
    splits = {path: tables(path, source.columns) for path in paths}
    if source.val and parse_share(source.val) is None:
        splits[source.val] = tables(source.val, source.columns, setting="--data.val")

    def key() -> dict[str, Any]:
        marks = [prepared.mark(rows) for found in splits.values() for rows in found.values()]
        return {"rows": marks, "source": repr(source), "chat": known(chat)}

    return prepared.kept(name, sum(len(rows) for found in splits.values() for rows in found.values()), key, make)


def known(chat: Chat) -> list[Any]:
    """Return what a rendering depends on."""
    return [prepared.words(chat.tokenizer), chat.system, chat.conversations, chat.every_turn]


def _sorted_out(source: Source, chat: Chat) -> tuple[Rows, Rows, Rows, list[str]]:
    parts, notes = [], []
    named = mixture.weighted_paths(source.path)
    splits = formats.together(partial(_part, path, chat, source) for path, _ in named)
    for (path, weight), (train, val, bad) in zip(named, splits, strict=True):
        notes += [words for words in bad if words not in notes]  # a validation file is read with each
        parts.append(mixture.Part(path, weight, train, *spaced(val, source.held_out)))
    if [p.path for p in parts] == ["docstrings"] and not chat.conversations and parts[0].weight == 1:
        return parts[0].train, parts[0].val, parts[0].test, notes  # one of each, and split so that nothing is shared
    train, val, test, more = mixture.mixed(parts, source.near)
    return train, val, test, notes + more


def _part(path: str, chat: Chat, source: Source) -> tuple[Rows, Rows, list[str]]:
    if path != "docstrings":
        return read_file(path, chat.rows, source)
    train, val = ([r for row in rows for r in _own(chat, row)] for rows in docstrings.load())
    return train, val, []


def spaced(rows: Rows, n: int) -> tuple[Rows, Rows]:
    """(`n` of the held-out rows, evenly spaced, or all for 0; as many of the others, which no setting is chosen on). Of others whose
    prompt is in the first part, none is taken: the standard library says some sentences twice."""
    n = min(n or len(rows), len(rows))
    val = [i * len(rows) // n for i in range(n)]
    known = {rows[i].get("prompt") for i in val} - {None}
    others = [i for i in sorted({*range(len(rows))} - {*val}) if rows[i].get("prompt") not in known]
    m = min(n, len(others)) if len(others) >= LEAST else 0
    return [rows[i] for i in val], [rows[others[i * len(others) // m]] for i in range(m)]


def _own(chat: Chat, row: dict[str, str]) -> list[dict[str, str]]:
    """Render a packaged row. A template that cannot render it can render none."""
    try:
        return chat.rows(row)
    except formats.BadRow as fault:
        raise core.UserError("the chat template cannot be trained with", got=fault.seen, needed="an answer behind the text "
                             "that generation starts from, and a token that ends it", cause=fault.why,
                             next="--chat-template FILE with another, or answers with their reasoning") from None  # fmt: skip


def read_file(
    path: str, one: Callable[[dict], list[dict]], source: Any = None, *, what: str = "pair or conversation", every_column: bool = False,
    needed: str = "prompt (str) and completion (str), messages, conversations (ShareGPT), or instruction and output (Alpaca)",
) -> tuple[list[dict], list[dict], list[str]]:  # fmt: skip
    """(train, val, what to say of rows left out, and of columns that nothing reads unless `every_column` is used) of a file or of a data set
    on the hub, each row as `one` makes it. `source` says where validation comes from; what has no split of its own gets one by its `source`
    column."""
    columns, max_bad, val = (getattr(source, k, d) for k, d in (("columns", ""), ("max_bad", 0.0), ("val", "")))
    splits, share = tables(path, columns), parse_share(val)
    files = [(path, splits["train"])]
    if val and share is None:
        refuse_training_data(val, path)
        files.append((val, tables(val, columns, setting="--data.val")["train"]))
    elif not share and (name := next((k for k in VALIDATION if k in splits), "")):
        files.append((f"{path} ({name})", splits[name]))
    (train, *held_out), notes = formats.sorted_out(files, one, what=what, needed=needed, max_bad=max_bad)
    refuse_answered(train, path)
    if not every_column and (
        unread := column_names.not_read(splits["train"], path, needed, formats.mapping(columns).values())
    ):
        notes.append(unread)
    if held_out:
        return *_without_collections(train, held_out[0], notes), notes
    chosen = hold_out([row["source"] for row in train], share or 0.05)
    if chosen is None and any(row.get("source") for row in splits["train"]):
        names = len({row["source"] for row in train})
        single = [{k: v for k, v in row.items() if k != "source"} for row in splits["train"]]
        (train,), _ = formats.sorted_out([(path, single)], one, what=what, needed=needed, max_bad=max_bad)
        chosen = hold_out([row["source"] for row in train], share or 0.05)
        notes.append(
            f"the column `source` has {names} values, too few to hold out some of them: single rows are held out, of all values"
        )
    chosen = chosen or [False] * len(train)
    train, kept = ([r for r, a in zip(train, chosen, strict=True) if a is side] for side in (False, True))
    if not share and 0 < len(kept) < LEAST:
        notes.append(
            f"{len(kept)} of {len(chosen)} rows are held out (one prompt or `source` in twenty, drawn by its text): what they measure "
            "is uncertain; --data.val 0.2 holds out more"
        )
    return train, kept, notes


def refuse_answered(rows: list[dict], path: str) -> None:
    """Raise UserError if most prompts end with their answer: each could be copied, in validation, too. Short answers may be one of the choices
    that a question ends with."""
    pairs = [(r["prompt"].strip(), r["completion"].strip()) for r in rows if {"prompt", "completion"} <= r.keys()]
    long = [(p, c) for p, c in pairs if len(c) >= LONG and p != c]
    given = [(p, c) for p, c in long if p.endswith(c)]
    if len(long) >= LEAST and len(given) > 0.8 * len(long):
        raise core.UserError(
            f"the prompts of {path} end with their answers: {len(given):,} of {len(long):,}", got=repr(given[0][0][-80:]),
            needed="prompts that end where the answer begins", cause="a column with the whole example, its answer included (`text` of Alpaca), "
            "is read as the prompt", next="--data.columns with the column of the question alone, or the rows without that column",
        )  # fmt: skip


def _without_collections(train: list[dict], val: list[dict], notes: list[str]) -> tuple[list[dict], list[dict]]:
    """Return both splits, without their `source` where it names a few large collections that both have: rows of one data set are no copies
    of one another, and whoever made two files knew what is in them."""
    sizes, theirs = Counter(row["source"] for row in train), {row["source"] for row in val}
    few_collections = len(sizes) <= COLLECTIONS and len(train) >= LEAST_EACH * len(sizes)
    if not few_collections or len(theirs & sizes.keys()) < len(theirs) / 2:
        return train, val
    notes.append(
        f"the column `source` has {len(sizes)} values, which both files have: read as names of data sets, not of documents"
    )
    return tuple([row | {"source": alone(row)} for row in rows] for rows in (train, val))


def alone(row: dict[str, Any]) -> str:
    """Return the whole row as text: a group that has no other row."""
    return " ".join(str(value) for key, value in row.items() if key != "source")


def tables(path: str, columns: str = "", setting: str = "--data.path") -> dict[str, list[dict[str, Any]]]:
    """Splits of a file or of a data set on the hub, columns under the names that are read."""
    found = files.tables(path, setting)
    return {k: formats.renamed(rows, columns, path) for k, rows in found.items()} if columns else found


def text(row: dict[str, Any]) -> list[dict[str, str]]:
    """A row of both columns as text."""
    return [formats.texts(row, COLUMNS)]


def group_field(rows: Rows) -> core.Field:
    """Return the description of `source`. Rows of a file without such a column have a part of their own text there, mostly the question."""
    some = rows[:: max(1, len(rows) // 500)]
    return core.Field("group", grouped_by="" if any(map(_names_its_source, some)) else "question")


def _names_its_source(row: dict[str, Any]) -> bool:
    own = alone(row)
    if row["prompt"].startswith('{"messages"'):
        own += "\n" + "\n".join(str(turn.get("content")) for turn in json.loads(row["prompt"])["messages"])
    return row["source"] not in own


class Pairs(core.Data):
    """Rows of text; `collate` turns some into ids and labels, so that gates can blank or exchange a prompt."""

    collator: Any = None
    """The trainer's, which pads, or packs."""
    limit: int = 0
    """Most tokens of a row."""

    def __init__(self, rows: list[dict[str, str]], chat: Chat):
        self.rows, self.chat = rows, chat
        self.fields = {"prompt": core.Field("input"), "completion": core.Field("target"), "source": group_field(rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, str]:
        return self.rows[index]

    def collate(self, samples: list[dict[str, str]]) -> dict[str, Any]:
        """{input_ids, labels, attention_mask (B, T)} beside the texts as they are; where the trainer packs, what it reads is
        `inputs`, all samples in one row (1, sum of their tokens)."""
        examples = [self.chat.example(s["prompt"], s["completion"]) for s in samples]
        batch = dict(self.collator(examples))
        if "position_ids" in batch:
            batch = {"inputs": batch, **padded(examples, self.chat)}
        return {**batch, **{key: [s[key] for s in samples] for key in self.fields}}


def behind(shots: list[dict[str, str]], batch: dict[str, Any], chat: Chat) -> dict[str, torch.Tensor]:
    """The pairs of a batch behind answered prompts, as `padded`; their own completions alone are scored."""
    prompts = [(chat.opening(chat.turns(p, shots), p), c) for p, c in zip(*(batch[k] for k in COLUMNS), strict=True)]
    parts = [(chat.ids(opening), chat.answer(c, opening)) for opening, c in prompts]
    return padded([{"input_ids": a + b, "labels": [IGNORED] * len(a) + b} for a, b in parts], chat)


def padded(examples: list[dict[str, list[int]]], chat: Chat) -> dict[str, torch.Tensor]:
    """Ids and labels of some examples as {input_ids, labels, attention_mask} (B, T), padded on the right."""
    pad = {"input_ids": chat.tokenizer.pad_token_id, "labels": IGNORED, "attention_mask": 0}
    rows = [{k: torch.tensor(v) for k, v in e.items()} for e in examples]
    rows = [row | {"attention_mask": torch.ones_like(row["labels"])} for row in rows]
    return {k: pad_sequence([row[k] for row in rows], True, value) for k, value in pad.items()}


def short_enough(
    rows: list[dict[str, str]], chat: Chat, source: Source, name: str, limit: int
) -> tuple[list[dict[str, str]], str]:
    """(rows that fit, what to say of the others). A completion that is cut never ends; one that is cut off teaches nothing."""
    if not rows:
        raise core.UserError(f"{name}: no pair in it", got=f"--data.path {source.path}", cause="too few rows, or all with one `source` or the "
                             "same first question: one of these in twenty is held out",
                             needed="some dozens that differ there, a validation split, or --data.val FILE")  # fmt: skip
    sizes = lengths(tuple((r["prompt"], r["completion"]) for r in rows), chat)
    long = [i for i, n in enumerate(sizes) if n > limit]
    if not long:
        return rows, ""
    measured = f"{len(long)} of {len(rows)} pairs are longer than {limit} tokens (one has {sizes[long[0]]}: {beginning(rows[long[0]])})"
    if len(long) > spared(source.max_bad, len(rows)):
        raise too_long(f"{name}: {measured}", len(long) / len(rows), max(sizes), source)
    return [r for i, r in enumerate(rows) if i not in {*long}], f"{measured}: left out"


def too_long(what: str, share: float, longest: int, source: Any) -> core.UserError:
    """Return the error for a share of rows over the limit. Without --data.max-length the limit is the model's context (see `limit`)."""
    ways = [f"--data.max-length {longest}"] if source.max_length else []
    if share < 0.5:  # more is no file for this model
        ways.append(f"--data.max-bad {share + 0.001:.3f} leaves them out")
    ways += [] if source.max_length else ["a model with a longer context, or rows cut into shorter ones"]
    return core.UserError(
        what,
        needed=f"at most {source.max_bad:.1%} (--data.max-bad)",
        cause="a limit for short texts, or a template that adds much"
        if source.max_length
        else "rows longer than the model's context",
        next=", or ".join(ways),
    )


def beginning(row: dict[str, Any]) -> str:
    """Return the first words of what a row asks. The rows of a split are not numbered as those of their file."""
    text = row["prompt"]
    if text.startswith('{"messages"'):
        text = " ".join(str(turn.get("content") or "") for turn in json.loads(text)["messages"])
    return repr(text[:60])


def spared(max_bad: float, rows: int) -> int:
    """Rows of a split that may be too long: the share `max_bad`, or one, so that a single row of megabytes decides nothing."""
    return max(int(max_bad * rows), int(max_bad > 0 and rows >= FEW))


def limit(source: Any, splits: list[list[int]], context: float) -> int:
    """Most tokens of a row: what the settings say, else what both splits need, within the context. 1% of each may be longer, less if `max_bad`
    is; a larger `max_bad`, for rows that are unusable, leaves out no more of the good ones."""
    if source.max_length:
        return source.max_length
    if source.path == "docstrings":
        return 96
    return int(min(context, max((enough(sizes, source.max_bad) for sizes in splits), default=ROUND)))


def enough(sizes: list[int], max_bad: float) -> int:
    """Length that all but 1% of a split need, or all but `max_bad` if that is less; a multiple of `ROUND`."""
    longest = sorted(sizes)[len(sizes) - 1 - spared(min(max_bad, LONGER), len(sizes))] if sizes else 1
    return -(-longest // ROUND) * ROUND


def described(rows: list[dict[str, str]], chat: Chat, sizes: list[int], limit: int) -> dict[str, str]:
    """Return notes on a user's data: lengths, turns, what ends an answer and what the template puts around it."""
    form = chat.form
    dated = str(chat.tokenizer.chat_template).startswith(templates.MACRO)
    found = {"date": f"{templates.DATE:%d %b %Y} wherever the template asks for today's"} if dated else {}
    found |= {"lengths": percentiles(sizes, limit), "answers": spread(answer_tokens(rows, chat))}
    if chat.conversations:
        found["turns"] = turns(tuple(r["prompt"] for r in rows), chat)
    found["scripts"] = metrics.scripts([r["completion"] for r in rows[:2000]])
    around = f", after {form.lead!r}" * bool(form.lead) + f", then {form.close!r}" * bool(form.close)
    found["scored"] = f"{'every answer' if chat.every_turn else 'the last answer'} up to {form.end!r}{around}"
    return found | echoed(rows, ("completion",))


def echoed(rows: list[dict[str, str]], answers: Sequence[str]) -> dict[str, str]:
    """Return a note if most answers begin with the text of their prompt: a column of whole texts beside one of prompts."""
    count = sum(len(p := r["prompt"].strip()) > ECHO and all(r[k].strip().startswith(p) for k in answers) for r in rows)
    note = f"{count:,} of {len(rows):,} rows have answers that begin with the text of their prompt: if these are whole texts, take it off"
    return {"echoed": note} if count > len(rows) / 2 else {}


@lru_cache(4)
def turns(prompts: tuple[str, ...], chat: Chat) -> str:
    """Return a note on the turns of conversations, their answers included."""
    each = [chat.given(prompt)["messages"] for prompt in prompts]
    roles = sorted({t["role"] for one in each for t in one} | {"assistant"})
    unscored = sum(formats.UNSCORED in t for one in each for t in one)
    note = f"; {unscored} answers have a weight of 0 and are not scored" if unscored else ""
    return f"{sum(len(t) + 1 for t in each) / len(each):.1f} a row on average; roles {', '.join(roles)}{note}"


def passes(path: str, rows: int, train: Any) -> dict[str, str]:
    """Return a note if the preset, made for the packaged data, ends before a whole epoch of a user's."""
    if path == "docstrings" or train.epochs >= 1:
        return {}
    steps = max(1, math.ceil(train.epochs * rows / train.batch_size))
    read = min(rows, steps * train.batch_size)
    return {
        "training": f"{train.epochs:g} epochs: {read:,} of {rows:,} rows, in {steps:,} steps; --train.epochs 3 reads all of them three times"
    }


def paced(cfg: Any, every: float) -> None:
    """`every`, the preset's interval of evaluations and checkpoints in epochs, belongs to a part of an epoch of the packaged data. In
    whole epochs of a user's data it becomes half an epoch: there would be an evaluation every few steps."""
    if cfg.data.path == "docstrings" or cfg.train.epochs < 1:
        return
    cfg.train.eval_every = 0.5 if cfg.train.eval_every == every else cfg.train.eval_every
    cfg.run.save_every = 0.5 if cfg.run.save_every == every else cfg.run.save_every


def percentiles(sizes: list[int], limit: int) -> str:
    """Return a note on lengths."""
    order = sorted(sizes) or [0]
    half, most = order[len(order) // 2], order[int(0.99 * (len(order) - 1))]
    return f"{half} tokens a row (median), {most} (99%), {order[-1]} (longest); limit {limit}"


def spread(sizes: list[int]) -> str:
    """Return a note on the lengths of answers, for which `--max-new-tokens` must leave room."""
    order = sorted(sizes) or [0]
    at = (order[int(share * (len(order) - 1))] for share in (0.05, 0.5, 0.95, 0.99, 1))
    return "{} · {} · {} · {} · {} tokens (5% · median · 95% · 99% · longest), the end of the turn included".format(*at)


def answer_tokens(rows: list[dict[str, str]], chat: Chat, key: str = "completion") -> list[int]:
    """Tokens of each answer, with the one that ends it."""
    return _answer_tokens(tuple(r[key] for r in rows), chat)


@cache
def _answer_tokens(answers: tuple[str, ...], chat: Chat) -> list[int]:
    return prepared.of_texts("answers", answers, partial(known, chat), partial(_counted, answers, chat))


def _counted(answers: tuple[str, ...], chat: Chat) -> list[int]:
    ids = chat.tokenizer([chat.framed(a) for a in answers], add_special_tokens=False)["input_ids"] if answers else []
    return [len(one) for one in ids]


@lru_cache(4)
def plain_tokens(texts: tuple[str, ...], chat: Chat) -> list[int]:
    """Tokens of each text, without what a template puts around it."""
    return prepared.of_texts("tokens", texts, partial(known, chat), partial(_plain, texts, chat))


def _plain(texts: tuple[str, ...], chat: Chat) -> list[int]:
    ids = chat.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    return [len(one) for one in ids]


@cache
def lengths(pairs: tuple[tuple[str, str], ...], chat: Chat) -> list[int]:
    """Tokens of each pair, counted once per process, and those of many pairs once on this machine."""
    return prepared.of_texts("lengths", pairs, partial(known, chat), partial(_lengths, pairs, chat))


def _lengths(pairs: tuple[tuple[str, str], ...], chat: Chat) -> list[int]:
    if chat.conversations:
        return [len(chat.example(p, c)["input_ids"]) for p, c in pairs]
    frame = len(chat.ask(chat.turns("")))
    ids = chat.tokenizer([p + chat.framed(c) for p, c in pairs], add_special_tokens=False)["input_ids"] if pairs else []
    return [frame + len(one) + 1 for one in ids]  # a token that the seam may split
