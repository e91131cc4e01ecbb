"""Content hashes of every sample of a split. They find exact duplicates and contradictory labels, and show whether data
are those of an earlier run.

Samples are hashed by `Data.identity` (the file's bytes, for example) if the data set provides it, else by the compared
fields. Nothing is decoded without need.
"""

import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from trainworthy.core.data.loader import as_it_is, start_worker
from trainworthy.core.recipe.stage import Data

SECONDS = 10.0  # per split: time limit for reading all samples if each needs `get`
CHUNK = 256  # samples per task of a thread or worker
UNKNOWN = -1  # class of a sample without one
CONTRADICTORY = 0.01
"""Largest allowed fraction of a split's samples whose input also occurs with another class. Real
image sets stay below 0.001, sets of short texts below 0.005."""
DISTINCT = 0.25
"""Fraction of distinct inputs below which an input does not identify its sample (a few categories, short windows of
letters). Several classes for one input are then natural and only reported."""


@dataclass
class Contents:
    """Identities of the samples of one split."""

    total: int
    indices: np.ndarray
    """(n,) hashed samples: all, unless reading them would take too long."""
    hashes: np.ndarray
    """(n,) uint64."""
    values: dict[str, list] = field(default_factory=dict)
    """Class target and groups of each hashed sample, by field, if known for all."""
    raw: bool = False
    """Whether these are hashes of raw records (`Data.identity`)."""

    @property
    def complete(self) -> bool:
        return len(self.indices) == self.total

    def digest(self) -> str:
        """Digest of the hashes in order, and of the values."""
        found = hashlib.blake2b(np.ascontiguousarray(self.indices), digest_size=16)
        found.update(np.ascontiguousarray(self.hashes))
        return found.hexdigest()

    def digests(self) -> dict[str, str]:
        return {k: hashlib.blake2b(repr(v).encode(), digest_size=16).hexdigest() for k, v in self.values.items()}


def number(content: bytes | str) -> int:
    """Return 64 bits of a hash. Among a million samples, two different ones collide in one of 40 million data sets."""
    content = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def of_fields(sample: Mapping[str, Any], names: Iterable[str]) -> int:
    found = hashlib.blake2b(digest_size=8)
    for name in names:
        found.update(bytes_of(sample[name]))
    return int.from_bytes(found.digest())


def bytes_of(value: Any) -> bytes:
    """Return a text or a tensor as it is hashed."""
    return value.encode() if isinstance(value, str) else torch.as_tensor(value).contiguous().numpy().tobytes()


def compared_fields(data: Data) -> list[str]:
    """Return the fields by which samples are compared: the sources if there are any, else the inputs."""
    roles = [f.role for f in data.fields.values()]
    return [k for k, f in data.fields.items() if f.role == ("source" if "source" in roles else "input")]


def kept_fields(data: Data) -> list[str]:
    """Return the fields whose values are stored for every sample: classes and groups."""
    return [k for k, f in data.fields.items() if f.role == "group" or (f.role == "target" and f.classes)]


def plain(value: Any) -> Any:
    """Return a string, or the number in a tensor without axes; None for anything else."""
    value = value if isinstance(value, str) else torch.as_tensor(value)
    return value if isinstance(value, str) else value.item() if value.ndim == 0 else None


def read(data: Data, scanned: Contents, *, cost: float, everything: bool | None = None) -> Contents:
    """Return the contents of all samples of `data`: from raw records, from the hashes of a scan, or by making each
    sample (`cost` seconds) on all cores within `SECONDS`. Otherwise return the scanned part."""
    if len(data) and data.identity(0) is not None:
        return _raw(data, scanned)
    if scanned.complete or everything is False:
        return scanned
    cores = 1  # without fork, a worker cannot import a recipe's own file
    if sys.platform == "linux":
        cores = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if not everything and cost * len(data) / cores > SECONDS:
        return scanned
    workers = cores if cost * len(data) > 4.0 and cores > 1 else 0  # a worker takes part of a second to start
    how = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    generator = torch.Generator().manual_seed(0)  # torch draws a base seed for its workers
    loader = DataLoader(_Hashed(data), batch_sampler=_ranges(len(data)), collate_fn=as_it_is, generator=generator,
                        worker_init_fn=start_worker, **how)  # fmt: skip
    return _joined(len(data), list(loader), raw=False)


def _raw(data: Data, scanned: Contents) -> Contents:
    """Hash by `identity`. Slow reads use threads: they wait for a disk, and hashing releases the interpreter lock."""
    cheap = type(data).peek is not Data.peek

    def chunk(indices: Sequence[int]) -> tuple[list[int], dict[str, list]]:
        hashes = [number(data.identity(i)) for i in indices]
        return hashes, {k: [plain(data.peek(i, k)) for i in indices] for k in kept_fields(data)} if cheap else {}

    parts = _ranges(len(data))
    started = time.monotonic()
    found = [chunk(parts[0])]
    seconds = (time.monotonic() - started) * (len(parts) - 1)
    if seconds < 1.0:
        found += map(chunk, parts[1:])
    else:
        with ThreadPoolExecutor(min(16, 2 * (os.cpu_count() or 1))) as pool:
            found += pool.map(chunk, parts[1:])
    out = _joined(len(data), found, raw=True)
    if scanned.complete and not cheap:
        out.values = scanned.values
    return out


def _joined(total: int, found: list[tuple[list[int], dict[str, list]]], *, raw: bool) -> Contents:
    hashes = np.array([h for part, _ in found for h in part], dtype=np.uint64)
    values = {k: [v for _, part in found for v in part[k]] for k in found[0][1]}
    return Contents(total, np.arange(total), hashes, values, raw)


class _Hashed(Dataset):
    """Samples made by `get` and hashed in place, so that a worker sends back only the hash."""

    def __init__(self, data: Data):
        self.data, self.names, self.kept = data, compared_fields(data), kept_fields(data)

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: Sequence[int]) -> tuple[list[int], dict[str, list]]:
        hashes, values = [], {k: [] for k in self.kept}
        for i in indices:
            sample = self.data.get(i, None)
            hashes.append(of_fields(sample, self.names))
            for k, kept in values.items():
                kept.append(plain(sample[k]))
        return hashes, values


def _ranges(n: int) -> list[range]:
    return [range(i, min(n, i + CHUNK)) for i in range(0, n, CHUNK)]


# ------------------------------------------------------------------------------------------------------------ comparing
def shared(a: Contents, b: Contents) -> Iterator[tuple[int, int]]:
    """Return (sample of `a`, its first copy in `b`) for every sample of `a` that is also in `b`."""
    if a.raw != b.raw or not len(a.hashes) or not len(b.hashes):
        return
    order = np.argsort(b.hashes, kind="stable")
    at = np.searchsorted(b.hashes[order], a.hashes).clip(max=len(order) - 1)
    for i in np.flatnonzero(b.hashes[order][at] == a.hashes):
        yield int(a.indices[i]), int(b.indices[order[at[i]]])


def expected_copies(val: Contents, train: Contents) -> float:
    """Return how many samples of `val` have a copy in `train` if both are random parts of data that repeat by themselves: the share of
    training samples with a copy in training, too, times the samples of `val`."""
    _, counts = np.unique(train.hashes, return_counts=True)
    return float(counts[counts > 1].sum()) / max(1, len(train.hashes)) * len(val.hashes)


def median_lengths(indices: list[int], sizes: list[list[list[int]]], copies: set[int]) -> list[float]:
    """Return [median length of the samples in `copies`, of the other ones], in characters and entries; [] if there are none of either.
    `sizes`: for each field those of the samples at `indices`."""
    lengths = [sum(math.prod(size) for size in sample) for sample in zip(*sizes, strict=True)]
    parts = [[n for i, n in zip(indices, lengths, strict=True) if (i in copies) == copied] for copied in (True, False)]
    return [statistics.median(part) for part in parts] if all(parts) else []


def contradictions(found: Contents, data: Data) -> dict[str, Any] | None:
    """Find samples whose input also occurs with another class: their number, pairs of them, and the fraction of
    distinct inputs. None if inputs are not what is compared, or if no class is known."""
    key = next((k for k, f in data.fields.items() if f.role == "target" and f.classes and k in found.values), None)
    if key is None or any(f.role == "source" for f in data.fields.values()):
        return None
    n = len(data.fields[key].classes)
    labels = [v if isinstance(v, int) and 0 <= v < n else UNKNOWN for v in found.values[key]]
    known = np.flatnonzero(np.array(labels) != UNKNOWN)
    if not len(known):
        return None
    labels, hashes = np.array(labels)[known], found.hashes[known]
    order = np.lexsort((labels, hashes))
    h, y = hashes[order], labels[order]
    first = np.flatnonzero(np.append(True, h[1:] != h[:-1]))
    last = np.append(first[1:], len(h)) - 1
    torn = y[first] != y[last]  # sorted by class within an input
    count = int((last - first + 1)[torn].sum())
    samples = found.indices[known][order]
    pairs = sorted((int(samples[a]), int(samples[b])) for a, b in zip(first[torn], last[torn], strict=True))
    return {
        "field": key,
        "samples": count,
        "of": len(known),
        "distinct_share": len(first) / len(known),
        "pairs": pairs[:20],
    }


def refused(found: dict[str, Any] | None) -> bool:
    """Return whether there are more contradictory labels than allowed."""
    allowed = found and max(2, CONTRADICTORY * found["of"])
    return bool(found) and found["samples"] > allowed and found["distinct_share"] >= DISTINCT


def changes(before: dict[str, dict], now: dict[str, dict]) -> list[str]:
    """Return the differences between the identities (`inventory.identity`) of two runs' data, one line per split."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        a, b = before.get(name), now.get(name)
        if a is None or b is None:
            lines.append(f"{name}: {'not there before' if a is None else 'gone'}")
            continue
        fields = a["values"].keys() | b["values"].keys()
        other = sorted(k for k in fields if a["values"].get(k) != b["values"].get(k))
        if a["samples"] != b["samples"]:
            lines.append(f"{name}: {b['samples']:,} samples instead of {a['samples']:,}")
        elif a["content"] != b["content"]:
            lines.append(f"{name}: other inputs ({b['samples']:,} samples, as before)")
        elif other:
            lines.append(f"{name}: other values of {', '.join(other)} ({b['samples']:,} samples with the same inputs)")
    return lines
