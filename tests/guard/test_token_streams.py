"""Text that runs across the samples of a batch (guard/measures/data/token_streams.py)."""

import os
from pathlib import Path

import pytest
import torch
from trainworthy.guard.measures.data import token_streams

TEXT = Path(os.__file__).read_text()[:30_000]
IDS = torch.tensor([sorted(set(TEXT)).index(c) for c in TEXT])


def windows(batch: int, *, across: bool) -> list[torch.Tensor]:
    """Windows (B, T) of a text in one of the two layouts."""
    n = len(IDS) // batch
    streams = IDS[: n * batch].view(n, batch).t() if across else IDS[: n * batch].view(batch, n)
    return list(streams.split(50, dim=1))[:-1]


@pytest.mark.parametrize("batch", [8, 32])
def test_a_text_across_the_samples(batch: int):
    assert token_streams.fault(windows(batch, across=True)) is not None
    assert token_streams.fault(windows(batch, across=False)) is None


def test_other_tokens_say_nothing():
    """Random tokens, samples that repeat each other, few of them."""
    torch.manual_seed(0)
    assert token_streams.fault([torch.randint(50, (16, 50)) for _ in range(20)]) is None
    assert token_streams.fault([IDS[50 * i : 50 * i + 50].expand(16, 50) for i in range(20)]) is None
    sums = [torch.stack([torch.tensor([int(d) for d in f"{a:03d}"] + [10, 11] + [int(d) for d in f"{7 * a % 1000:03d}"] + [12, 13]) for a in
                         torch.randint(1000, (16,)).tolist()]) for _ in range(60)]  # fmt: skip
    assert token_streams.fault(sums) is None
    starts = torch.randint(len(IDS) - 50, (400,))
    shuffled = [torch.stack([IDS[s : s + 50] for s in part]) for part in starts.split(16)]
    assert token_streams.fault(shuffled) is None
    assert token_streams.fault(windows(32, across=True)[:1]) is None
