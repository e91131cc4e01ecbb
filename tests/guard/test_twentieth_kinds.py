"""Kinds of mistakes that the twentieth set showed: overlap losses of logits, NaN in an evaluation, pictures and volumes that are moved apart from
their targets, padding at the other end, rates that drift. Those that `names` reads are in test_twentieth_names.py."""

import math
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainworthy.guard.measures.data import restored
from trainworthy.guard.measures.data.alignment import turned_apart
from trainworthy.guard.measures.data.padded_rows import PaddedRows
from trainworthy.guard.measures.data.scales import begins_otherwise, pooled
from trainworthy.guard.measures.losses.overlaps import Overlaps
from trainworthy.guard.measures.rates import unlikely
from trainworthy.guard.measures.scores.undefined import Undefined

from tests.guard import twentieth_set, twentieth_set_heldout
from tests.guard.guarding import assert_named
from tests.helpers.patches import patched as script_of

DRAW = torch.Generator().manual_seed(0)


class DiceLoss(nn.Module):
    def __init__(self, sigmoid):
        super().__init__()
        self.sigmoid = sigmoid

    def forward(self, scores, target):
        p = torch.sigmoid(scores) if self.sigmoid else scores
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


@pytest.mark.parametrize(("sigmoid", "probabilities", "wrong"), [
    (True, False, False), (False, False, True), (False, True, False), (True, True, False),
])  # fmt: skip
def test_an_overlap_of_logits(sigmoid, probabilities, wrong):
    seen, loss = Overlaps(), DiceLoss(sigmoid)
    for _ in range(4):
        target = (torch.rand(4, 1, 8, 8, generator=DRAW) < 0.2).float()
        scores = torch.randn(4, 1, 8, 8, generator=DRAW, requires_grad=True)
        scores = torch.sigmoid(scores) if probabilities else scores * 2
        seen.called(loss, (scores, target), {})
        seen.called(nn.MSELoss(), (scores, target), {})
    assert (seen.fault() is not None) == wrong


def test_scores_that_are_nan_in_part():
    healthy, partly, all_of_them = Undefined(), Undefined(), Undefined()
    for _ in range(8):
        x = torch.randn(2, 1, 8, 8, generator=DRAW)
        healthy.read(x)
        all_of_them.read(x * torch.nan)  # a run that diverged: its losses show that
        x[..., 6:] = torch.nan
        partly.read(x)
    assert healthy.fault() is None
    assert all_of_them.fault() is None
    assert "25% of the scores" in partly.fault()[0]


def test_batches_that_differ_in_their_means_have_one_scale_together():
    x = torch.randn(8, 100, generator=DRAW).double() + 5 * torch.arange(8)[:, None]
    mean, std = pooled([(float(row.mean()), float(row.std(correction=0))) for row in x])
    assert mean == pytest.approx(float(x.mean()))
    assert std == pytest.approx(float(x.std(correction=0)))


@pytest.mark.parametrize(("rising", "otherwise"), [(True, True), (False, False)])
def test_a_loader_that_begins_with_flat_pictures(rising, otherwise):
    contrast = torch.linspace(0.1, 2.0, 100) if rising else torch.ones(100)
    pictures = torch.randn(100, 1, 8, 8, generator=DRAW) * contrast[:, None, None, None]
    loader = DataLoader(list(zip(pictures, torch.zeros(100), strict=True)), 8)
    assert begins_otherwise([(loader, 2)], 4) is otherwise


def smooth(size):
    """A picture (1, size, size) without a symmetry."""
    return nn.functional.interpolate(torch.rand(1, 1, 5, 5, generator=DRAW), size=size, mode="bicubic")[0]


def smooth_volume(size):
    return nn.functional.interpolate(torch.rand(1, 1, 4, 4, 4, generator=DRAW), size=size, mode="trilinear")[0]


@pytest.mark.parametrize(("flips", "evaluated_too", "wrong"), [
    ("neither", False, False), ("both", False, False), ("input", False, True), ("input", True, False),
])  # fmt: skip
def test_pictures_and_their_larger_versions(flips, evaluated_too, wrong):
    def loader(flips):
        pairs = []
        for k in range(64):
            large = smooth(32)
            small = nn.functional.avg_pool2d(large, 2) + 0.02 * torch.randn(1, 16, 16, generator=DRAW)
            if k % 2 and flips != "neither":
                small, large = small.flip(-1), large.flip(-1) if flips == "both" else large
            pairs.append((small, large))
        return DataLoader([*pairs, (torch.zeros(1, 16, 16), torch.zeros(1, 32, 32))], 8)

    found = restored.apart(loader(flips), {1: loader(flips if evaluated_too else "neither")}, time.monotonic() + 60)
    assert (found is not None) == wrong


def adapted(rates, k):
    """A rate that follows a divergence, as PPO's may: two factors."""
    return rates[-1] * (1.5 if torch.rand(1, generator=DRAW) < 0.5 else 1 / 1.5)


RATES = {
    "constant": (lambda rates, k: 0.1, False),
    "cosine with restarts": (lambda rates, k: 0.1 * (1.01 + math.cos(math.pi * (k % 10) / 10)), False),
    "by the length": (lambda rates, k: 0.1 * float(torch.rand(1, generator=DRAW) + 0.3), False),
    "by the length, falling": (lambda rates, k: 0.1 * 0.98**k * float(torch.rand(1, generator=DRAW) + 0.3), False),
    "by the length of all steps": (
        lambda rates, k: rates[-1] * float(torch.rand(1, generator=DRAW) * 0.6 + 0.65),
        True,
    ),
    "adapted": (adapted, False),
    "negative": (lambda rates, k: 0.1 - 0.002 * k, True),
}


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("steps", [60, 300])
def test_rates_of_single_steps(name, steps):
    rule, wrong = RATES[name]
    for _ in range(20):
        rates = [0.1]
        for k in range(1, steps):
            rates.append(rule(rates, k))
        assert (unlikely(rates) is not None) == wrong


@pytest.mark.parametrize(("kind", "wrong"), [("both", False), ("another axis", True), ("the volume alone", True)])
def test_volumes_and_their_masks(kind, wrong):
    def loader(count, turn):
        samples = []
        for k in range(count):
            mask = (smooth_volume(16) > 0.6).float()
            volume = mask + 0.5 * torch.randn(1, 16, 16, 16, generator=DRAW)
            if turn and k % 2:
                volume = volume.rot90(1, (1, 3))
                mask = (
                    mask.rot90(1, {"both": (1, 3), "another axis": (1, 2)}[kind])
                    if kind != "the volume alone"
                    else mask
                )
            samples.append((volume, mask))
        return DataLoader(samples, 2)

    found = turned_apart(loader(20, True), {1: loader(8, False)}, time.monotonic() + 60)
    assert (found is not None) == wrong


def sessions(n, *, front=True, single=False):
    """Rows (n, 12) of 5 to 12 items; `single`: the last item at each place."""
    rows = torch.zeros(n, 12, dtype=torch.int64)
    for row in rows:
        size = int(torch.randint(5, 12, (1,), generator=DRAW))
        items = torch.randint(1, 50, (size,), generator=DRAW)
        items = items[-1:].expand(size) if single else items
        row[12 - size if front else 0 : 12 if front else size] = items
    return rows


@pytest.mark.parametrize("front", [True, False])
def test_rows_that_are_padded_at_the_other_end(front):
    seen, items = PaddedRows(), torch.zeros(50, 4)
    for _ in range(8):
        seen.look(sessions(16), items, 0, True)
        seen.look(sessions(4, front=front), items, 0, False)
        seen.look(sessions(4, front=False), items, None, False)  # a table without padding
    assert (seen.turned() is None) == front


@pytest.mark.parametrize("kind", ["next", "single", "candidate"])
def test_next_items_that_are_one_and_the_same(kind):
    seen, items = PaddedRows(), torch.zeros(50, 4)
    for _ in range(8):
        row = sessions(16)
        seen.look(row, items, 0, True)
        if kind == "candidate":  # repeated for each place of the history, padding too
            seen.look(row[:, -1:].expand(-1, 12), items, 0, True)
        else:
            last = row[:, -1:].expand(-1, 12) if kind == "single" else row.roll(7, 1)
            seen.look(last.masked_fill(row == 0, 0), items, 0, True)
            seen.look(
                row.roll(1, 0).clamp(min=1).masked_fill(row == 0, 0), items, 0, True
            )  # items that are not the next ones
    assert (seen.repeated() is not None) == (kind == "single")


PLANTED = {p.id: p for half in (twentieth_set, twentieth_set_heldout) for p in half.BUGS}
CASES = {
    "awd_lstm--rate-not-restored": ("schedule", "the base rate is not put back"),
    "spheres_unet3d--turned-about-other-axes": ("samples", "one draw for picture and mask"),
    "sasrec_sessions--always-last-item": ("targets", "every position predicts the last item"),
    "sasrec_sessions--filled-from-left": ("evaluated", "the evaluation pads at the other end"),
    "espcn_photos--flipped-apart": ("samples", "one draw for both"),
    "spheres_unet3d--dice-of-logits": ("loss-input", "an overlap is computed from probabilities"),
    "spheres_unet3d--last-window-missing": ("finite", "0 is divided by 0"),
}


@pytest.mark.verify
@pytest.mark.parametrize("id", CASES)
def test_guard_names_the_cause(id, tmp_path):
    assert_named(script_of(PLANTED[id]), tmp_path, *CASES[id])
