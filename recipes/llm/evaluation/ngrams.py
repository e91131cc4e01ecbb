"""Baselines in bits per byte of text: unigram, bigram and trigram (Witten-Bell) over the same tokens, and xz."""

import lzma
import math
from collections import Counter
from itertools import pairwise

import numpy as np


def frequencies(documents: list[np.ndarray], vocabulary: int) -> np.ndarray:
    """Return log-frequencies of scored tokens (all but each document's first), (V,). Each count is raised by one, so that none is zero."""
    counts = sum(
        (np.bincount(d[1:], minlength=vocabulary) for d in documents), start=np.ones(vocabulary, dtype=np.int64)
    )
    return np.log(counts / counts.sum())


def unigram(log_p: np.ndarray, documents: list[np.ndarray], size: int) -> float:
    """Return bits per byte of documents of `size` bytes."""
    return -sum(log_p[d[1:]].sum() for d in documents) / math.log(2) / size


def smoothed(train: list[np.ndarray], val: list[np.ndarray], log_p: np.ndarray, size: int) -> dict[str, float]:
    """Return {name: bits per byte} for both orders. Witten-Bell (Witten & Bell 1991): a context followed n times, by t different tokens,
    leaves t / (n + t) to the next lower order. No context crosses documents."""
    pairs: Counter[tuple[int, int]] = Counter()
    triples: Counter[tuple[int, int, int]] = Counter()
    for document in train:
        row = document.tolist()
        pairs.update(pairwise(row))
        triples.update(zip([-1, *row], row, row[1:], strict=False))
    after, kinds = Counter(), Counter()
    after2, kinds2 = Counter(), Counter()
    for (a, _), n in pairs.items():
        after[a] += n
        kinds[a] += 1
    for (a, b, _), n in triples.items():
        after2[a, b] += n
        kinds2[a, b] += 1
    p, bits2, bits3 = np.exp(log_p), 0.0, 0.0
    for document in val:
        row = document.tolist()
        for a, b, c in zip([-1, *row], row, row[1:], strict=False):
            two = (pairs[b, c] + kinds[b] * p[c]) / (after[b] + kinds[b]) if after[b] else p[c]
            three = (triples[a, b, c] + kinds2[a, b] * two) / (after2[a, b] + kinds2[a, b]) if after2[a, b] else two
            bits2 -= math.log2(two)
            bits3 -= math.log2(three)
    return {"bigram, Witten-Bell": bits2 / size, "trigram, Witten-Bell": bits3 / size}


def xz(train: list[str], val: list[str]) -> dict[str, float]:
    """Return {name: bits per byte} of the validation texts alone, and after the training texts, whose phrases xz then knows."""
    known, held_out = ("\n".join(t).encode() for t in (train, val))
    packed = [len(lzma.compress(t, preset=9 | lzma.PRESET_EXTREME)) for t in (held_out, known, known + held_out)]
    return {
        "xz": 8 * packed[0] / len(held_out),
        "xz, knowing the training texts": 8 * (packed[2] - packed[1]) / len(held_out),
    }
