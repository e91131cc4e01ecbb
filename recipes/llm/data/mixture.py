"""Several data sets as one: how often each is read, what stands in it twice, and what its validation asks about."""

import re
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from trainworthy.core.data import texts
from trainworthy.recipes.shared import hub

from trainworthy import core

LETTERS = (
    20_000_000  # of all rows; from here on near duplicates are sought by a part of their runs, for the memory's sake
)


Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Part:
    """One data set of a mixture."""

    path: str
    weight: float
    """How often its training rows are read in an epoch."""
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    test: list[dict[str, Any]] = field(default_factory=list)


def parts(paths: str) -> list[tuple[str, float]]:
    """[(path, weight)] of `a.jsonl,b.jsonl*2`."""
    found = []
    for one in paths.split(","):
        path, _, weight = one.strip().partition("*")
        if not path or not re.fullmatch(r"(\d+(\.\d+)?)?", weight) or (weight and not float(weight)):
            raise core.UserError(f"--data.path {paths}: '{one}' is not a data set", needed="PATH or PATH*WEIGHT, the weight above 0",
                                 next="--data.path a.jsonl,b.jsonl*2")  # fmt: skip
        found.append((path, float(weight or 1)))
    return found


def absolute(paths: str) -> str:
    """The same data sets, files by their whole names; not where one has a sign in it that parts data sets."""
    words = [word.strip().partition("*") for word in paths.split(",")]
    whole = [hub.absolute(path) for path, _, _ in words]
    if any({",", "*"} & {*path} for path in whole):
        return paths
    return ",".join(path + star + weight for path, (_, star, weight) in zip(whole, words, strict=True))


def mixed(found: list[Part], near: float) -> tuple[Rows, Rows, Rows, list[str]]:
    """(train, val, test, what to say). First goes what stands there twice, then what the validation of any of them asks about; the
    weights come last: rows that are read twice because a weight says so are no duplicates."""
    val, test = ([row for part in found for row in getattr(part, split)] for split in ("val", "test"))
    rows, told = [(part, row) for part in found for row in part.train], []
    for gone, why in ((lambda r: repeated(r, near), f"repeat an earlier one exactly or nearly (--data.near {near:g})"),
                      (lambda r: asked_about(r, val + test), "are what validation asks about, or nearly")):  # fmt: skip
        out = gone([row for _, row in rows])
        if out:
            told.append(f"{len(out):,} of {len(rows):,} training pairs {why}: left out")
        rows = [r for i, r in enumerate(rows) if i not in out]
    train = []
    for part in found:
        own = [row for p, row in rows if p is part]
        n = round(part.weight * len(own))
        train += (
            [own[i * len(own) // n] for i in range(n)] if part.weight < 1 else [own[i % len(own)] for i in range(n)]
        )
        if len(found) > 1 or part.weight != 1:
            told.append(f"{part.path}: {len(own):,} pairs, {n:,} of an epoch")
    if not train:
        raise core.UserError("nothing is left to train on", got="; ".join(told), needed="pairs that validation does not ask about",
                             cause="one file as its own validation, or a weight that leaves no row")  # fmt: skip
    return train, val, test, told


def said(row: dict[str, str]) -> str:
    """What two rows are compared by."""
    return f"{row['prompt']} {row['completion']}"


def prints(text: str, one_in: int = 1) -> set[int]:
    """Fingerprints of a text's runs of four words; of many texts one run `one_in` so many will do, the same ones in each."""
    found = (int.from_bytes(blake2b(" ".join(c).encode(), digest_size=8).digest()) for c in texts.chunks(text.split()))
    return {n for n in found if n % one_in == 0}


def repeated(rows: list[dict[str, str]], near: float) -> set[int]:
    """Positions of rows that an earlier one says again: equal words, or a share of `near` of its runs of four words in one row.

    Of runs that more than `RARE` rows have (a template, a system turn) nothing is learnt, as in `core/data/texts.py`.
    """
    if not near:
        return set()
    plain = [texts.normal(said(row)) for row in rows]
    one_in = 1 + sum(map(len, plain)) // LETTERS
    seen: set[str] = set()
    where: dict[int, list[int]] = {}
    gone = set()
    for i, text in enumerate(plain):
        runs = prints(text, one_in) if near < 1 else set()
        rare = [at for at in (where.get(n, ()) for n in runs) if len(at) <= texts.RARE]
        ((_, most),) = Counter(j for at in rare for j in at).most_common(1) or [(0, 0)]
        if text in seen or (len(rare) >= texts.MIN and most >= near * len(rare)):
            gone.add(i)
            continue
        seen.add(text)
        for n in runs:
            where.setdefault(n, []).append(i)
    return gone


def asked_about(train: list[dict[str, str]], val: list[dict[str, str]]) -> set[int]:
    """Positions in `train` of what `val` asks about: a row's rare runs of four words, a share of `KNOWN` of them, in one training
    row (`core/data/texts.py` measures leakage so), equal words, or the very prompt where it is no common one."""
    wanted: dict[int, set[int]] = {}
    for v, row in enumerate(val):
        for n in prints(texts.normal(said(row))):
            wanted.setdefault(n, set()).add(v)
    runs = [prints(texts.normal(said(row))) & wanted.keys() for row in train]
    rows_with = Counter(n for found in runs for n in found)
    rare = {n: vals for n, vals in wanted.items() if rows_with[n] <= texts.RARE}
    total = Counter(v for vals in rare.values() for v in vals)
    prompts = Counter(texts.normal(row["prompt"]) for row in train)
    asked, equal = ({texts.normal(f(row)) for row in val} for f in (lambda row: row["prompt"], said))
    gone = set()
    for i, row in enumerate(train):
        shared = Counter(v for n in runs[i] & rare.keys() for v in rare[n])
        near = any(c >= texts.MIN and c >= texts.KNOWN * total[v] for v, c in shared.items())
        prompt = texts.normal(row["prompt"])
        if near or texts.normal(said(row)) in equal or (prompt in asked and prompts[prompt] <= texts.RARE):
            gone.add(i)
    return gone
