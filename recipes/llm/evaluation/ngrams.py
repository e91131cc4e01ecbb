"""What counting says: unigram, bigram and trigram (Witten-Bell) over the same tokens, and xz, in bits per byte of text."""

import lzma
import math
from collections import Counter
from itertools import pairwise

import numpy as np


def frequencies(documents: list[np.ndarray], vocabulary: int) -> np.ndarray:
    """(V,) log-frequencies of what is asked for (all but each document's first token); one more for each, so that none is zero."""
    counts = sum(
        (np.bincount(d[1:], minlength=vocabulary) for d in documents), start=np.ones(vocabulary, dtype=np.int64)
    )
    return np.log(counts / counts.sum())


def unigram(log_p: np.ndarray, documents: list[np.ndarray], size: int) -> float:
    """Bits per byte of documents of `size` bytes."""
    return -sum(log_p[d[1:]].sum() for d in documents) / math.log(2) / size


def smoothed(train: list[np.ndarray], val: list[np.ndarray], log_p: np.ndarray, size: int) -> dict[str, float]:
    """{name: bits per byte} of both orders. Witten-Bell (Witten & Bell 1991): what followed a context n times, in t kinds, leaves
    t / (n + t) to the next lower order. No context reaches across documents."""
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
    """{name: bits per byte} of the held-out texts by themselves, and behind the training texts, whose phrases it then knows."""
    known, held_out = ("\n".join(t).encode() for t in (train, val))
    packed = [len(lzma.compress(t, preset=9 | lzma.PRESET_EXTREME)) for t in (held_out, known, known + held_out)]
    return {
        "xz": 8 * packed[0] / len(held_out),
        "xz, knowing the training texts": 8 * (packed[2] - packed[1]) / len(held_out),
    }
