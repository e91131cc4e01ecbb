"""Statistics of single fields: shape, dtype, range and moments, and the histogram of a target."""

import hashlib
import math
from collections import Counter
from typing import Any

import numpy as np
from torch import Tensor
from trainworthy.core.data import texts

SAME_EXTREMES = 0.05  # of the range, within which extremes are those that the moments lead to


class Stats:
    """Running shape, dtype, range and moments of one field."""

    def __init__(self):
        self.shapes: Counter = Counter()
        self.dtypes: Counter = Counter()
        self.low, self.high = math.inf, -math.inf
        self.bad = 0
        self.words: Counter = Counter()
        self.seen: set[int] = set()
        self.moments: dict[int, np.ndarray] = {}
        self.digest = hashlib.blake2b(digest_size=16)

    def add(self, value: Tensor | str) -> None:
        raw = value.encode() if isinstance(value, str) else value.contiguous().numpy().tobytes()
        self.seen.add(hash(raw))
        self.digest.update(raw)
        if isinstance(value, str):
            self.shapes[(len(value),)] += 1
            self.words[len(texts.words(value))] += 1
            self.dtypes["str"] += 1
            return
        self.shapes[tuple(value.shape)] += 1
        self.dtypes[str(value.dtype).removeprefix("torch.")] += 1
        v = value.numpy().astype(np.float64)  # on small rows, numpy is several times as fast as torch
        finite = np.isfinite(v)
        if not finite.all():
            self.bad += 1
        channels = v.reshape(len(v), -1) if v.ndim == 3 and finite.all() else v[finite][None]
        if channels.size:
            self.low, self.high = min(self.low, channels.min().item()), max(self.high, channels.max().item())
            moments = self.moments.setdefault(len(channels), np.zeros((3, len(channels))))
            moments += (channels.sum(1), np.square(channels).sum(1), np.full(len(channels), channels.shape[1]))

    def report(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "dtype": " ".join(self.dtypes),
            "shapes": len(self.shapes),
            "non_finite_samples": self.bad,
            "unique": len(self.seen),
        }
        if lengths := self._lengths():
            out["lengths"] = lengths
        sizes = sorted(self.shapes.elements())
        if sizes:
            out["shape"] = {"min": list(sizes[0]), "median": list(sizes[len(sizes) // 2]), "max": list(sizes[-1])}
        if math.isfinite(self.low):
            total, square, n = max(self.moments.items(), key=lambda kv: kv[1][2].sum())[1]
            mean = total / n
            out |= {"min": self.low, "max": self.high, "mean": mean.round(4).tolist(),
                    "std": np.sqrt(np.maximum(square / n - mean**2, 0)).round(4).tolist()}  # fmt: skip
        return out

    def _lengths(self) -> dict[str, dict[str, int]]:
        """Smallest, 5%, median, 95% and largest number of characters and words, or of entries of every axis that
        varies."""
        if self.words:
            characters = Counter({k[0]: n for k, n in self.shapes.items()})
            return {"characters": spread(characters), "words": spread(self.words)}
        if len({len(s) for s in self.shapes}) != 1:
            return {}
        axes = [Counter() for _ in next(iter(self.shapes))]
        for shape, n in self.shapes.items():
            for axis, size in zip(axes, shape, strict=True):
                axis[size] += n
        return {f"axis {i}": spread(axis) for i, axis in enumerate(axes) if len(axis) > 1}


def spread(sizes: Counter) -> dict[str, int]:
    rows = sorted(sizes.elements())
    shares = {"min": 0, "5%": 0.05, "median": 0.5, "95%": 0.95, "max": 1}
    return {name: rows[round(q * (len(rows) - 1))] for name, q in shares.items()}


def histogram(targets: list, classes: list[str] | None) -> dict[str, Any]:
    """Count samples per class, with smallest, median and largest class. Values outside the classes are counted
    separately."""
    counts = Counter(targets)
    known = range(len(classes)) if classes else sorted(counts)
    per_class = {str(classes[k] if classes else k): counts.get(k, 0) for k in known}
    sizes = sorted(per_class.values())
    invalid = {str(k): v for k, v in counts.items() if k not in set(known)}
    return {"classes": per_class, "per_class": {"min": sizes[0], "median": sizes[len(sizes) // 2], "max": sizes[-1]},
            "invalid": invalid, "valid_share": 1 - sum(invalid.values()) / max(1, len(targets))}  # fmt: skip


def class_field(*splits: dict[str, dict[str, Any]]) -> str | None:
    """Return the first target that is a class in every split. `splits`: reports by field. Answers in text may repeat in one split only."""
    return next((k for k in splits[0] if all(fields[k].get("classes") for fields in splits)), None)


def rescaled(train: dict[str, Any], val: dict[str, Any]) -> bool:
    """Return whether pictures of two splits are the same kind on two scales: the linear map of each channel that takes the moments of one
    to those of the other takes the extremes, too. Darker or flatter pictures keep their extremes, or have other ones."""
    if any(len(one.get("shape", {}).get("median", ())) != 3 or 0 in one["std"] for one in (train, val)):
        return False
    pairs = zip(train["mean"], train["std"], val["mean"], val["std"], strict=True)
    if all(abs(mt - mv) < st / 2 and 2 / 3 < sv / st < 1.5 for mt, st, mv, sv in pairs):
        return False
    return _leads_to(train, val) or _leads_to(val, train)


def _leads_to(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the map of the moments takes the extremes of `one`, which all channels share, to those of `other`."""
    moments = zip(one["mean"], one["std"], other["mean"], other["std"], strict=True)
    maps = [(so / s, mo - m * so / s) for m, s, mo, so in moments]
    low, high = (pick(one[k] * scale + shift for scale, shift in maps) for k, pick in (("min", min), ("max", max)))
    return max(abs(low - other["min"]), abs(high - other["max"])) < SAME_EXTREMES * (other["max"] - other["min"])
