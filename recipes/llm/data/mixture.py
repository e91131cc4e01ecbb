"""Several data sets as one: weights, duplicates across them, and rows that validation asks about."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from trainworthy.core.data import texts
from trainworthy.recipes.llm.data import conversations
from trainworthy.recipes.shared import hub

from trainworthy import core

LETTERS = (
    # words in all rows from which near duplicates are searched with a sample of their runs, to limit memory
    20_000_000
)


Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Part:
    """One data set of a mixture."""

    path: str
    weight: float
    """How many times its training rows are read in an epoch."""
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    test: list[dict[str, Any]] = field(default_factory=list)


def weighted_paths(paths: str) -> list[tuple[str, float]]:
    """Return [(path, weight)] of `a.jsonl,b.jsonl*2`."""
    found = []
    for one in paths.split(","):
        path, _, weight = one.strip().partition("*")
        if not path or not re.fullmatch(r"(\d+(\.\d+)?)?", weight) or (weight and not float(weight)):
            raise core.UserError(f"--data.path {paths}: '{one}' is not a data set", needed="PATH or PATH*WEIGHT, the weight above 0",
                                 next="--data.path a.jsonl,b.jsonl*2")  # fmt: skip
        found.append((path, float(weight or 1)))
    return found


def absolute(paths: str) -> str:
    """Return the same data sets with absolute file names, unless a name contains one of the separators."""
    words = [word.strip().partition("*") for word in paths.split(",")]
    whole = [hub.absolute(path) for path, _, _ in words]
    if any({",", "*"} & {*path} for path in whole):
        return paths
    return ",".join(path + star + weight for path, (_, star, weight) in zip(whole, words, strict=True))


def mixed(found: list[Part], near: float) -> tuple[Rows, Rows, Rows, list[str]]:
    """Return (train, val, test, notes). It removes duplicates first, then training rows that any validation set asks about. Weights are
    applied last, so that rows repeated by a weight are no duplicates."""
    val, test = ([row for part in found for row in getattr(part, split)] for split in ("val", "test"))
    rows, notes = [(part, row) for part in found for row in part.train], []
    for gone, why in ((lambda r: repeated(r, near), f"repeat an earlier one exactly or nearly (--data.near {near:g})"),
                      (lambda r: asked_about(r, val + test), "are what validation asks about, or nearly")):  # fmt: skip
        out = gone([row for _, row in rows])
        if out:
            notes.append(f"{len(out):,} of {len(rows):,} training pairs {why}: left out")
        rows = [r for i, r in enumerate(rows) if i not in out]
    sources = {row["source"] for row in val + test}
    rows = [
        (part, row | {"source": pair_text(row)} if row["source"] in sources and opens(row) else row)
        for part, row in rows
    ]
    train = []
    for part in found:
        own = [row for p, row in rows if p is part]
        n = round(part.weight * len(own))
        train += (
            [own[i * len(own) // n] for i in range(n)] if part.weight < 1 else [own[i % len(own)] for i in range(n)]
        )
        if len(found) > 1 or part.weight != 1:
            notes.append(f"{part.path}: {len(own):,} pairs, {n:,} of an epoch")
    if not train:
        raise core.UserError("nothing is left to train on", got="; ".join(notes), needed="pairs that validation does not ask about",
                             cause="one file as its own validation, rows that hardly differ, or a weight that leaves no row",
                             next="--data.val FILE with other rows, or --data.near 1, which leaves out exact copies alone")  # fmt: skip
    return train, val, test, notes


def opens(row: dict[str, str]) -> bool:
    """Return whether the `source` of a row is no more than its first question. `Hi` opens conversations that have nothing else in common,
    and what validation asks about is left out by its words."""
    if not conversations.is_prompt(row["prompt"]):
        return row["source"] == row["prompt"]
    turns = json.loads(row["prompt"]).get("messages", ())
    return row["source"] == next((turn.get("content") for turn in turns if turn.get("role") == "user"), None)


def pair_text(row: dict[str, str]) -> str:
    """Return the text by which rows are compared."""
    return f"{row['prompt']} {row['completion']}"


def prints(text: str, one_in: int = 1) -> set[int]:
    """Return fingerprints of a text's runs of four words. For large data one run in `one_in` is kept, the same ones in every text."""
    found = (int.from_bytes(blake2b(" ".join(c).encode(), digest_size=8).digest()) for c in texts.chunks(text.split()))
    return {n for n in found if n % one_in == 0}


def repeated(rows: list[dict[str, str]], near: float) -> set[int]:
    """Return the positions of rows that repeat an earlier one: equal words, or a share of at least `near` of their runs of four words in one
    row.

    Runs that more than `RARE` different rows have (a template, a system turn, tools) do not count, as in `core/data/texts.py`. A later
    part of the same conversation is no repetition of its beginning.
    """
    if not near:
        return set()
    plain = [texts.normal(pair_text(row)) for row in rows]
    one_in = 1 + sum(map(len, plain)) // LETTERS
    runs = {text: prints(text, one_in) if near < 1 else set() for text in dict.fromkeys(plain)}
    rows_with = Counter(n for found in runs.values() for n in found)
    seen: set[str] = set()
    where: dict[int, list[int]] = {}
    gone = set()
    for i, text in enumerate(plain):
        rare = [where.get(n, ()) for n in runs[text] if rows_with[n] <= texts.RARE]
        shared = Counter(j for at in rare for j in at).most_common()
        same = (j for j, most in shared if most >= near * len(rare) and not continues(rows[i], rows[j]))
        if text in seen or (len(rare) >= texts.MIN and next(same, None) is not None):
            gone.add(i)
            continue
        seen.add(text)
        for n in runs[text]:
            where.setdefault(n, []).append(i)
    return gone


def continues(row: dict[str, str], earlier: dict[str, str]) -> bool:
    """Return whether a row of a conversation goes on where an earlier one ended: each answer may be a row of its own."""
    if not all(conversations.is_prompt(one["prompt"]) for one in (row, earlier)):
        return False
    both = [json.loads(one["prompt"]).get("messages", ()) for one in (row, earlier)]
    return len(both[1]) < len(both[0]) and both[0][: len(both[1])] == both[1]


def asked_about(train: list[dict[str, str]], val: list[dict[str, str]]) -> set[int]:
    """Return the positions in `train` of what `val` asks about: a share of at least `KNOWN` of a validation row's rare runs of four words in
    one training row (as `core/data/texts.py` measures leakage), equal words, or the same prompt if it is not a common one."""
    wanted: dict[int, set[int]] = {}
    for v, row in enumerate(val):
        for n in prints(texts.normal(pair_text(row))):
            wanted.setdefault(n, set()).add(v)
    runs = [prints(texts.normal(pair_text(row))) & wanted.keys() for row in train]
    rows_with = Counter(n for found in runs for n in found)
    rare = {n: vals for n, vals in wanted.items() if rows_with[n] <= texts.RARE}
    total = Counter(v for vals in rare.values() for v in vals)
    prompts = Counter(texts.normal(row["prompt"]) for row in train)
    held_out, equal = ({texts.normal(f(row)) for row in val} for f in (lambda row: row["prompt"], pair_text))
    gone = set()
    for i, row in enumerate(train):
        shared = Counter(v for n in runs[i] & rare.keys() for v in rare[n])
        near = any(c >= texts.MIN and c >= texts.KNOWN * total[v] for v, c in shared.items())
        prompt = texts.normal(row["prompt"])
        if near or texts.normal(pair_text(row)) in equal or (prompt in held_out and prompts[prompt] <= texts.RARE):
            gone.add(i)
    return gone
