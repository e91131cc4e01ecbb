"""Counts, hashes and compares the data before training. It uses fields and roles, and knows no domain."""

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainworthy.core.base.errors import UserError
from trainworthy.core.data import alike, series, texts
from trainworthy.core.data import contents as hashed
from trainworthy.core.data.contents import compared_fields
from trainworthy.core.data.field_statistics import Stats, class_field, histogram
from trainworthy.core.recipe.stage import Data

TORN, TORN_COMPARED = 10, 2000  # times closer than a sample's own class; samples that are compared with all others
COMPARED = 20_000  # samples per split kept for comparison by content
SHORT_TEXT, SHORT_ROW = 160, 64  # characters; tokens, categories
VALUES = 200  # a target with more values (or more than half as many as samples), and no class names, is not categorical


@dataclass
class Scan:
    """One split, read once through the evaluation path."""

    name: str
    total: int
    indices: list[int]
    hashes: list[int] = field(default_factory=list)
    """Hash of each sample's compared fields: its sources, else its inputs."""
    seen: hashed.Contents | None = None
    """The same for `contents.py`, with classes and groups."""
    every: hashed.Contents | None = None
    """Contents of all samples, if available."""
    contradictory: dict[str, Any] | None = None
    """Inputs that occur with two classes."""
    kept: list[int] = field(default_factory=list)
    """Positions (in `indices`) of the rows of `contents` and `columns`."""
    contents: Tensor | None = None
    """(N, D) pooled content (`alike.rows`), of one input centred and of unit norm; None if samples differ in size."""
    widths: list[int] = field(default_factory=list)
    """Widths of the parts of such a row, one for each long input."""
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of these inputs, pooled."""
    columns: Tensor | None = None
    """(N, D') raw content, flattened, first 4,096 entries."""
    targets: dict[str, list] = field(default_factory=dict)
    groups: dict[str, list] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Strings by field. Texts of the input are joined, under their names joined by " + "."""
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    sizes: dict[str, list[list[int]]] = field(default_factory=dict)
    """Per input field and sample: characters, or entries along each axis."""
    fabricated: dict[str, list[float]] = field(default_factory=dict)
    """Fraction of each sample's entry that was not measured, for fields that declare it."""
    names: list[str | None] = field(default_factory=list)
    """What the source calls each kept row."""
    whole: str = ""
    """Key in `texts` of the model's input, if it reads only text (and integer rows made from it)."""
    short: bool = False
    """Whether samples are short texts, or few numbers that are ids or counts. Two of them may be equal by chance."""
    notes: dict[str, str] = field(default_factory=dict)
    """The data set's own notes."""
    fingerprint: str = ""
    """Digest of every field of 512 evenly spaced samples, by which the band of healthy runs recognises the data."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digest of every field over all samples that were read."""

    def index(self, row: int) -> int:
        """Return the sample index of a row of `contents`."""
        return self.indices[self.kept[row]]


def merge_notes(notes: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the notes of all splits as lines that name their splits; what several splits share is one line."""
    found: dict[str, list[str]] = {}
    for split, own in notes.items():
        for what, text in own.items():
            found.setdefault(f"{what}: {text}", []).append(split)
    return [f"{', '.join(splits)}: {note}" for note, splits in found.items()]


def scan(name: str, data: Data, *, seconds: float = 8.0, everything: bool = False, samples: int | None = None,
         hash_all: bool | None = None, tick: Callable[[int], None] = lambda done: None) -> Scan:  # fmt: skip
    """Read evenly spaced samples of `data`: as many as `seconds` allow (at least 2,000), or `samples`, or everything.
    `tick` receives the number read. `hash_all`: hash all samples (True), only those read if there are no raw records
    (False), or all if that takes seconds (None)."""
    started = time.monotonic()
    for i in range(min(8, len(data))):
        data.get(i, None)
    cost = (time.monotonic() - started) / max(1, min(8, len(data)))
    count = len(data) if everything else min(len(data), samples or max(2000, int(seconds / max(cost, 1e-6))))
    indices = data.representative(count)
    found = Scan(name, len(data), indices, notes=dict(data.notes), fingerprint=_fingerprint(data))
    began = time.monotonic()
    stats = {k: Stats() for k in data.fields}
    contents: list[list[Tensor]] = []
    columns: list[Tensor] = []
    strings, tensors, found.whole = _units(data)
    compared = compared_fields(data)
    for position, i in enumerate(indices):
        sample = data.get(i, None)
        for key, spec in data.fields.items():
            value = torch.as_tensor(sample[key]) if not isinstance(sample[key], str) else sample[key]
            stats[key].add(value)
            if spec.fabricated:
                found.fabricated.setdefault(key, []).append(_share(key, i, name, spec.fabricated(sample)))
            if key in compared:
                found.sizes.setdefault(key, []).append([len(value)] if isinstance(value, str) else list(value.shape))
            elif spec.role in ("target", "group"):
                plain = hashed.plain(value)
                plain = None if spec.role == "target" and isinstance(plain, float) else plain  # continuous
                (found.targets if spec.role == "target" else found.groups).setdefault(key, []).append(plain)
        found.hashes.append(hashed.of_fields(sample, compared))
        for key, names in strings.items():
            found.texts.setdefault(key, []).append("\n".join(sample[k] for k in names))
        tick(position + 1)
        parts = [torch.as_tensor(sample[k]) for k in tensors]
        if parts and position % -(-count // COMPARED) == 0:
            found.kept.append(position)
            found.names.append(data.source_name(i))
            if not found.whole:  # the angle between rows of token ids has no meaning
                contents.append([alike.pooled(p) for p in parts])
            columns.append(torch.cat([p.flatten().float() for p in parts])[:4096])
    if contents and (compared_by := alike.rows(contents)):
        found.contents, found.widths, found.shapes = compared_by
    if columns and len({len(c) for c in columns}) == 1:
        found.columns = torch.stack(columns)
    found.short = bool(indices) and _is_short(data.get(indices[0], None), found.sizes)
    for key, spec in data.fields.items():
        named = {"grouped_by": spec.grouped_by} if spec.grouped_by else {}
        found.fields[key] = {"role": spec.role, **named, **stats[key].report()}
        values = set(found.targets.get(key, [None]))
        repeat = len(values) <= min(VALUES, len(indices) // 2)  # answers that are all different are no classes
        if spec.role == "target" and None not in values and (spec.classes or repeat):
            found.fields[key] |= histogram(found.targets[key], spec.classes)
    for key, shares in found.fabricated.items():
        found.fields[key]["fabricated"] = _made_up(found, data, shares)
    found.digests = {key: one.digest.hexdigest() for key, one in stats.items() if not data.fields[key].computed}
    _hash_all(found, data, cost=(time.monotonic() - began) / max(1, count), wanted=everything or hash_all)
    return found


def _hash_all(found: Scan, data: Data, *, cost: float, wanted: bool | None) -> None:
    """Return what can be compared over all samples; `cost`: seconds to read one."""
    known = {k: v for k, v in {**found.targets, **found.groups}.items() if k in hashed.kept_fields(data)}
    indices, hashes = np.array(found.indices), np.array(found.hashes, dtype=np.uint64)
    found.seen = hashed.Contents(found.total, indices, hashes, known)
    found.every = hashed.read(data, found.seen, cost=cost, everything=wanted)
    found.contradictory = hashed.contradictions(found.every if found.every.values else found.seen, data)


def identity(scans: dict[str, Scan]) -> dict[str, dict[str, Any]]:
    """Return what identifies the data, by split: number of samples, digest of all hashes, values of targets and groups.
    `read`, `hashed`: how many samples that covers."""
    out = {}
    for name, s in scans.items():
        values = {k: d for k, d in s.digests.items() if s.fields[k]["role"] in ("target", "group")}
        for key, digest in s.every.digests().items():
            values[key] = values.get(key, "") + digest
        out[name] = {"samples": s.total, "read": len(s.indices), "hashed": len(s.every.indices),
                     "content": s.every.digest(), "values": values}  # fmt: skip
    return out


def read_all(
    data: Mapping[str, Data], *, everything: bool = False, before: dict[str, dict] | None = None
) -> dict[str, Scan]:
    """Scan every split. With the `identity` of an earlier scan, read exactly as much as it did."""
    before = {name: one for name, one in (before or {}).items() if name in data and one["samples"] == len(data[name])}
    return {
        name: scan(name, one, everything=everything, samples=before.get(name, {}).get("read"),
                   hash_all=before[name]["hashed"] == before[name]["samples"] if name in before else None)
        for name, one in data.items()
    }  # fmt: skip


def _share(key: str, index: int, split: str, share: float) -> float:
    if not 0 <= float(share) <= 1:
        raise UserError(f"the fabricated share of '{key}' is not a share", got=f"{float(share):g} for sample {index} of {split}",
                        needed="a number from 0 to 1", cause="a count that was not divided by the size of the entry")  # fmt: skip
    return float(share)


def _made_up(found: Scan, data: Data, shares: list[float]) -> dict[str, Any]:
    """Mean and range of a declared fabricated fraction, and its mean in each class of the first categorical target."""
    out: dict[str, Any] = {"mean": sum(shares) / len(shares), "min": min(shares), "max": max(shares)}
    key = next((k for k, f in data.fields.items() if f.role == "target" and f.classes), None)
    for label, name in enumerate(data.fields[key].classes if key else ()):
        mine = [share for share, target in zip(shares, found.targets[key], strict=True) if target == label]
        if mine:
            out.setdefault("classes", {})[name] = sum(mine) / len(mine)
    return out


def _units(data: Data) -> tuple[dict[str, list[str]], list[str], str]:
    """Return ({name: string fields that form one text}, input fields that are tensors, name of the text that is the
    whole input). All input texts form one text, so that a question is compared together with its paragraph."""
    first = data.get(0, None)
    inputs = compared_fields(data)
    read = [k for k in inputs if isinstance(first[k], str)]
    units = {" + ".join(read): read} if read else {}
    units |= {k: [k] for k, f in data.fields.items() if f.role == "target" and isinstance(first[k], str)}
    tensors = [k for k in inputs if k not in read]
    made_from_it = all(
        torch.as_tensor(first[k]).ndim <= 1 and not torch.as_tensor(first[k]).is_floating_point() for k in tensors
    )
    return units, tensors, " + ".join(read) if made_from_it else ""


def _is_short(sample: Mapping[str, Any], sizes: dict[str, list[list[int]]]) -> bool:
    """Return whether no compared entry is a real number, and half of the samples are at most as long as `SHORT_TEXT` and `SHORT_ROW`."""

    def short(key: str) -> bool:
        text = isinstance(sample[key], str)
        middle = sorted(math.prod(size) for size in sizes[key])[len(sizes[key]) // 2]
        return middle <= (SHORT_TEXT if text else SHORT_ROW) and (
            text or not torch.as_tensor(sample[key]).is_floating_point()
        )

    return bool(sizes) and all(map(short, sizes))


def _fingerprint(data: Data) -> str:
    digest = hashlib.blake2b(str(len(data)).encode(), digest_size=16)
    for i in data.representative(min(512, len(data))):
        sample = data.get(i, None)
        for key in data.fields:
            digest.update(hashed.bytes_of(sample[key]))
    return digest.hexdigest()


def overlap(train: Scan, val: Scan) -> dict[str, Any]:
    """Find samples of `val` that are also in `train`: by exact content over all hashed samples, by near content
    (cosine), by text, by group. `compared`: how many of either, for exact and for near content."""
    pairs = dict(hashed.shared(val.seen, train.seen)) | dict(hashed.shared(val.every, train.every))
    exact = sorted(pairs.items())
    most = (val.every, train.every) if val.every.raw == train.every.raw else (val.seen, train.seen)
    near = [len(s.kept) if s.contents is not None else len(s.indices) if s.texts else 0 for s in (val, train)]
    repeated = round(hashed.expected_copies(val.every, train.every), 1) if exact else 0.0
    out: dict[str, Any] = {"exact": len(exact), "exact_pairs": exact[:20], "by_repeats": repeated, "near": None, "near_pairs": [], "groups": {},
                           "compared": {"exact": [len(c.indices) for c in most], "near": near,
                                        "of": [val.total, train.total]}}  # fmt: skip
    if exact and val.short and train.short and not train.every.raw:
        out["expected"] = repeated
        out["lengths"] = hashed.median_lengths(val.indices, list(val.sizes.values()), {i for i, _ in exact})
    if (best := _nearest(val, train)) is not None:
        score, at = best
        near = _copies(val, train, score, at)
        smooth = int((score >= limit(val)).sum()) - len(near)
        out |= {"near": len(near), "near_only": sum(val.index(i) not in pairs for i in near), "smooth": smooth, "limit": limit(val),
                "largest_similarity": round(score.max().item(), 4),
                "near_pairs": [(val.index(i), train.index(int(at[i]))) for i in near[:20]]}  # fmt: skip
        if None not in (*val.names, *train.names):
            out["series"] = series.torn(val.names, train.names, at.tolist())
    if train.texts:
        found = shared_texts(train, val)
        out["texts"] = {k: {**s.report(), "whole_input": k == train.whole} for k, s in found.items()}
    for key, groups in val.groups.items():
        mine, others = val.every.values.get(key, groups), train.every.values.get(key, train.groups.get(key, []))
        shared = set(mine) & set(others)
        out["groups"][val.fields[key].get("grouped_by", key)] = sorted(map(str, shared))[:20]
    return out


def limit(scan: Scan) -> float:
    """Return the similarity above which two samples are near duplicates."""
    return alike.limit(scan.widths, scan.shapes, scan.contents)


def _nearest(a: Scan, b: Scan) -> tuple[Tensor, Tensor] | None:
    """Return (similarity, row in `b`) of the nearest other row for every kept row of `a`; None if they cannot be
    compared."""
    if a.contents is None or b.contents is None or a.widths != b.widths or max(a.widths) < alike.SHORT:
        return None
    best = []
    for start in range(0, len(a.contents), 1024):
        block = alike.similarity(a.contents[start : start + 1024], b.contents, a.widths)
        if a is b:
            block[torch.arange(len(block)), torch.arange(start, start + len(block))] = -1.0
        best.append(block.max(1))
    return torch.cat([x.values for x in best]), torch.cat([x.indices for x in best])


def _copies(a: Scan, b: Scan, score: Tensor, at: Tensor) -> list[int]:
    """Return the kept rows of `a` that are near copies of their nearest row `at` of `b`."""
    close = (score >= limit(a)).nonzero().flatten()
    return close[alike.share_details(a.contents[close], b.contents[at[close]], a.widths, a.shapes)].tolist()


def repeats(found: Scan) -> dict[str, Any]:
    """Find samples with a copy in their own split: exact ones, and near ones (None if contents cannot be compared)."""
    copies = len(found.hashes) - len(set(found.hashes))
    out: dict[str, Any] = {"exact": copies, "near": None}
    if (best := _nearest(found, found)) is not None:
        close = _copies(found, found, *best)
        pairs = [(found.index(i), found.index(int(best[1][i]))) for i in close]
        out |= {"near": len(close), "compared": len(found.kept), "near_pairs": pairs[:20]}
    return out


def torn_copies(found: Scan) -> dict[str, Any] | None:
    """Find samples with a near copy of another class: as close as a picture that was saved again, and TORN times closer than any
    sample of their own class. Pictures that all look alike are therefore not reported. Return None if there are no more than allowed."""
    key = next((k for k, f in found.fields.items() if f["role"] == "target" and "classes" in f), None)
    if key is None or found.contents is None:
        return None
    if max(found.widths) < alike.SHORT or not isinstance(found.targets[key][0], int):
        return None
    rows, labels = found.contents, torch.tensor([found.targets[key][i] for i in found.kept])
    some = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:TORN_COMPARED]
    pairs: list[tuple[int, int]] = []
    for part in some.split(512):
        same = alike.similarity(rows[part], rows, found.widths)
        same[torch.arange(len(part)), part] = -1.0
        own = labels[part][:, None] == labels[None]
        near, at = same.masked_fill(own, -1.0).max(1)
        far = 1 - same.masked_fill(~own, -1.0).amax(1)
        torn = (near >= limit(found)) & (TORN * (1 - near) < far) & (far < 2)  # 2: the only one of its class
        pairs += [(found.index(int(i)), found.index(int(j))) for i, j in zip(part[torn], at[torn], strict=True)]
    if len(pairs) <= hashed.CONTRADICTORY * len(some):
        return None
    return {"samples": len(pairs), "of": len(some), "pairs": pairs[:20]}


def shared_texts(train: Scan, val: Scan) -> dict[str, texts.Shared]:
    """Return the texts that two splits share, by field; positions are sample indices."""
    both = [k for k in train.texts if k in val.texts]
    found = {k: texts.shared(train.texts[k], val.texts[k], whole=k == train.whole) for k in both}
    for one in found.values():
        one.exact = [(val.indices[v], train.indices[t]) for v, t in one.exact]
        one.near = [(val.indices[v], train.indices[t], share) for v, t, share in one.near]
    return found


def constant_columns(found: Scan) -> float | None:
    """Return the fraction of input entries with the same value in every sample."""
    if found.columns is None:
        return None
    return ((found.columns.max(0).values - found.columns.min(0).values) == 0).float().mean().item()


def target_in_input(train: Scan, val: Scan) -> tuple[float, int, float] | None:
    """Return (accuracy on `val`, column, accuracy of the majority class) of the single input entry that best predicts
    the target, from its 32 value bins."""
    key = class_field(train.fields, val.fields)
    if key is None or train.columns is None or val.columns is None or train.columns.shape[1] != val.columns.shape[1]:
        return None
    values = {*train.targets[key], *val.targets[key]}
    if min(v if isinstance(v, int) else 0 for v in values) < 0:
        return None
    place = {v: i for i, v in enumerate(sorted(values))}  # texts, or numbers that are far apart

    def some(scan: Scan, n: int) -> tuple[Tensor, Tensor]:  # random, because data sets are often sorted by class
        chosen = torch.randperm(len(scan.columns), generator=torch.Generator().manual_seed(0))[:n]
        return scan.columns[chosen], torch.tensor([place[v] for v in scan.targets[key]])[scan.kept][chosen]

    (x, y), (xv, yv) = some(train, 4000), some(val, 1000)
    n_classes = len(place)
    low, high = x.min(0).values, x.max(0).values
    bins = 32

    def binned(v: Tensor) -> Tensor:
        return ((v - low) / (high - low).clamp_min(1e-9) * bins).long().clamp(0, bins - 1)

    b, d = binned(x), x.shape[1]
    table = torch.zeros(d * bins * n_classes)
    table.scatter_add_(0, ((torch.arange(d) * bins + b) * n_classes + y[:, None]).flatten(), torch.ones(b.numel()))
    guess = table.view(d, bins, n_classes).argmax(2)
    hit = (guess[torch.arange(d), binned(xv)] == yv[:, None]).float().mean(0)
    return hit.max().item(), int(hit.argmax()), (yv == y.mode().values).float().mean().item()


def report(scans: dict[str, Scan]) -> dict[str, Any]:
    """Return the content of data.json."""
    splits = {
        name: {"samples": s.total, "read": len(s.indices), "unique_contents": len(set(s.hashes)),
               "constant_input_share": constant_columns(s), "contradictory": s.contradictory, "torn_copies": torn_copies(s), "notes": s.notes,
               "fields": s.fields}
        for name, s in scans.items()
    }  # fmt: skip
    out: dict[str, Any] = {"splits": splits}
    if "train" in scans and "val" in scans:
        out["overlap"] = overlap(scans["train"], scans["val"])
        found = target_in_input(scans["train"], scans["val"])
        keys = ("accuracy", "entry", "majority")
        out["best_single_input"] = None if found is None else dict(zip(keys, found, strict=True))
    pairs = [(a, b) for a, b in itertools.combinations(scans, 2) if (a, b) != ("train", "val")]
    out["overlaps"] = {f"{b} in {a}": overlap(scans[a], scans[b]) for a, b in pairs}
    # What was learnt and chosen on
    out["fingerprint"] = " ".join(s.fingerprint for k, s in scans.items() if k != "test")
    return out
