"""Pictures whose targets are flipped, turned or cropped on their own, and what is moved apart on purpose."""

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms import functional as TF
from trainworthy.guard.measures.data.drawn_apart import drawn_apart

from tests.conftest import patched
from tests.guard.guarding import guard

SIZE = 24


class Moved(torch.utils.data.Dataset):
    """Blobs on a textured ground: a picture and its mask, moved as `move` says."""

    def __init__(self, move, soft: bool = False):
        torch.manual_seed(0)
        random.seed(0)
        self.move, self.rows = move, []
        y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        for i in range(80):
            cy, cx = (int(v) for v in torch.randint(5, SIZE - 5, (2,)))
            mask = ((y - cy) ** 2 + (x - cx) ** 2 < 10 + i % 9).float()[None]
            picture = torch.nn.functional.interpolate(torch.rand(1, 3, 8, 8), SIZE, mode="bilinear")[0] + mask / 2
            self.rows.append((picture, picture.sqrt() if soft else mask))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return self.move(*self.rows[i])


def both(one):
    """Move picture and target by the same draw."""

    def move(x, y):
        seed = random.randrange(10**6)
        torch.manual_seed(seed)
        x = one(x)
        torch.manual_seed(seed)
        return x, one(y)

    return move


def each(one):
    """Move picture and target by a draw each."""
    return lambda x, y: (one(x), one(y))


def noised(move):
    colours = transforms.ColorJitter(0.3, 0.3, 0.3, 0.1)

    def run(x, y):
        x, y = move(x, y)
        return colours(x.clamp(0, 1)) + 0.03 * torch.randn_like(x), y

    return run


def turned(x, y):
    """Small turns and zooms, the same for both."""
    angle, size, shift = random.uniform(-15, 15), random.uniform(0.8, 1.2), [random.randint(-5, 5) for _ in range(2)]
    flip = random.random() < 0.5
    x, y = (TF.affine(v, angle, shift, size, 0.0) for v in (x, y))
    return (x.flip(-1), y.flip(-1)) if flip else (x, y)


flips = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()])
crops = transforms.RandomCrop(SIZE, padding=3)
CASES = [("flips", each(flips), True), ("flips", both(flips), False), ("crops", each(crops), True), ("crops", both(crops), False),
         ("colours", noised(each(flips)), True), ("colours", noised(both(flips)), False), ("turned", turned, False),
         ("noise", noised(lambda x, y: (x, y)), False), ("nothing", lambda x, y: (x, y), False)]  # fmt: skip


@pytest.mark.parametrize(("name", "move", "apart"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_masks_and_pictures(name: str, move, apart: bool):
    seen = observed({1: 8}, {(0,): 8})
    assert bool(drawn_apart(seen, DataLoader(Moved(move), 8), time.monotonic() + 30)) == apart


@pytest.mark.parametrize(
    ("inputs", "own", "apart"), [({(0,): 8}, False, True), ({}, False, False), ({(0, 1): 8}, True, False)]
)
def test_a_picture_as_target_counts_if_the_other_one_is_the_model_s_input(inputs, own: bool, apart: bool):
    """An autoencoder of two views, and a picture whose holes are drawn apart, are meant."""
    seen = observed({}, inputs, {1: 8}, own)
    assert bool(drawn_apart(seen, DataLoader(Moved(each(flips), soft=True), 8), time.monotonic() + 30)) == apart


def test_a_picture_whose_holes_are_turned():
    seen = observed({0: 8}, {})
    assert drawn_apart(seen, DataLoader(Moved(each(flips)), 8), time.monotonic() + 30) is None


class Traces(torch.utils.data.Dataset):
    """Series of two channels with a class for each step, moved as `move` says."""

    def __init__(self, move):
        torch.manual_seed(0)
        random.seed(0)
        classes = torch.randint(0, 3, (40, 12)).repeat_interleave(5, 1)
        self.move, self.rows = move, [(torch.randn(2, 60).cumsum(1) + c, c) for c in classes]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return self.move(*self.rows[i])


def rolled(x):
    return x.roll(int(torch.randint(-9, 10, (1,))), -1)


def reversed_at_times(x):
    return x.flip(-1) if torch.rand(1) < 0.5 else x


def cut(x):
    start = int(torch.randint(0, 12, (1,)))
    return x[..., start : start + 48]


LINES = [("rolled apart", each(rolled), True), ("rolled", both(rolled), False), ("reversed apart", each(reversed_at_times), True),
         ("reversed", both(reversed_at_times), False), ("the series alone", lambda x, y: (rolled(x), y), True), ("cut apart", each(cut), True),
         ("cut", both(cut), False), ("noised", lambda x, y: (rolled(x) + 0.1 * torch.randn(60), y), False),
         ("scaled", lambda x, y: (x * (1 + torch.rand(1)), y), False), ("one class", lambda x, y: (rolled(x), y * 0), False),
         ("nothing", lambda x, y: (x, y), False)]  # fmt: skip


@pytest.mark.parametrize(("name", "move", "apart"), LINES, ids=lambda v: v if isinstance(v, str) else "")
def test_series_and_the_classes_of_their_steps(name: str, move, apart: bool):
    seen = observed({1: 8}, {(0,): 8})
    assert bool(drawn_apart(seen, DataLoader(Traces(move), 8), time.monotonic() + 30)) == apart


def observed(places: dict, inputs: dict, floats: dict | None = None, own: bool = False) -> SimpleNamespace:
    fits = SimpleNamespace(places=Counter(floats or {}), inputs=Counter(inputs), own=own)
    return SimpleNamespace(places=places, roots={0: None}, fits=fits)


SEGMENTS = """
import random
import torch
from torch import nn
from torchvision import transforms

random.seed(0)
torch.manual_seed(0)
flips = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip()])

class Blobs(torch.utils.data.Dataset):
    def __init__(self, n):
        self.pictures, self.masks = torch.rand(n, 3, 16, 16), torch.zeros(n, 1, 16, 16)
        for x, y in zip(self.pictures, self.masks):
            a, b = (int(v) for v in torch.randint(0, 11, (2,)))
            y[:, a : a + 5, b : b + 5] = 1
            x[:, a : a + 5, b : b + 5] *= 0.3

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        seed = random.randrange(10**6)
        torch.manual_seed(seed)
        picture = flips(self.pictures[i])
        torch.manual_seed(seed)
        return picture, flips(self.masks[i])

model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(20):
    for x, y in torch.utils.data.DataLoader(Blobs(160), 16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
"""


def test_flips_that_torchvision_draws_although_random_is_seeded(tmp_path):
    broken = patched(SEGMENTS, ("        torch.manual_seed(seed)\n        return picture", "        random.seed(seed)\n        return picture"),
                     ("        torch.manual_seed(seed)\n        picture", "        random.seed(seed)\n        picture"))  # fmt: skip
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "flipped, turned or shifted differently" in verdicts["samples"].measured, printed
    verdicts, printed, _ = guard(SEGMENTS, tmp_path, interventions=False)
    assert verdicts["samples"].verdict == "pass", printed
