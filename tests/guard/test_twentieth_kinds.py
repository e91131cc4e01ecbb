"""Kinds of mistakes that the twentieth set showed: rows by a slice of shuffled indices, parts read as if they alternated, a temperature that
multiplies, a metric that is never reset, a next item that is the present one, overlap losses of logits, NaN in an evaluation."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainworthy.guard.checks import names
from trainworthy.guard.measures import restored
from trainworthy.guard.measures.alignment import turned_apart
from trainworthy.guard.measures.overlaps import Overlaps
from trainworthy.guard.measures.padded_rows import PaddedRows
from trainworthy.guard.measures.scales import begins_otherwise
from trainworthy.guard.measures.undefined import Undefined

from tests.conftest import patched
from tests.guard import twentieth_set, twentieth_set_heldout
from tests.guard.guarding import guard
from tests.helpers.patches import patched as script_of

DRAW = torch.Generator().manual_seed(0)

UPDATE = """
def update(agent, optimizer, obs, actions, advantages, size):
    order = np.arange(len(obs))
    for _ in range(4):
        np.random.shuffle(order)
        for start in range(0, len(obs), size):
            end = start + size
            rows = order[start:end]
            ratio = agent(obs[rows], actions[rows])
            weight = advantages[rows]
            (-ratio * weight).mean().backward()
            optimizer.step()


update(*[None] * 6)
"""
ROWS = "weight = advantages[rows]"
SHUFFLED = {
    "healthy": ([], False),
    "the slice": ([(ROWS, "weight = advantages[start:end]")], True),
    "a drawn order": ([(ROWS, "weight = advantages[start:end]"), ("np.random.shuffle(order)", "order = torch.randperm(len(obs))")], True),
    "no shuffle": ([(ROWS, "weight = advantages[start:end]"), ("        np.random.shuffle(order)\n", "")], False),
    "shuffled itself": ([(ROWS, "weight = advantages[start:end]"),
                         ("        for start", "        advantages = advantages[order]\n        for start")], False),
    "filled in that order": ([(ROWS, "kept[start:end] = ratio\n            weight = kept[start:end]")], False),
    "the indices": ([(ROWS, "weight = advantages[order[start:end]]")], False),
}  # fmt: skip

VIEWS = """
def train(loader, model, criterion, optimizer):
    for images, labels in loader:
        images = torch.cat([images[0], images[1]], dim=0)
        n = labels.shape[0]
        features = model(images)
        pairs = features.view(2, n, -1).transpose(0, 1)
        criterion(pairs, labels).backward()
        optimizer.step()


train(*[None] * 4)
"""
PAIRS = "pairs = features.view(2, n, -1).transpose(0, 1)"
VIEWED = {
    "healthy": ([], False),
    "alternating": ([(PAIRS, "pairs = features.view(n, 2, -1)")], True),
    "in place": (
        [(PAIRS, "pairs = model(images).reshape((n, 2, -1))"), ("        features = model(images)\n", "")],
        False,
    ),
    "under the same name": ([(PAIRS, "features = features.view(n, 2, -1)\n        pairs = features")], True),
    "stacked": ([(PAIRS, "pairs = features.view(n, 2, -1)"), ("dim=0", "dim=1")], False),
    "split first": (
        [(PAIRS, "features = torch.stack(features.chunk(2), 1)\n        pairs = features.view(n, 2, -1)")],
        False,
    ),
}

CONTRAST = """
class Contrast(nn.Module):
    def __init__(self, temperature=0.07):
        super().__init__()
        self.temperature = temperature

    def forward(self, a, b):
        logits = torch.matmul(a, b.T) / self.temperature
        return F.cross_entropy(logits, torch.arange(len(a)))


Contrast()(None, None)
"""
DIVIDED = "torch.matmul(a, b.T) / self.temperature"
MULTIPLIED = "torch.matmul(a, b.T) * self.temperature"
TEMPERATURES = {
    "healthy": ([], False),
    "multiplied": ([(DIVIDED, MULTIPLIED)], True),
    "multiplied later": ([(DIVIDED, "a @ b.T\n        logits = self.temperature * logits")], False),
    "an inverse": ([(DIVIDED, MULTIPLIED), ("temperature=0.07", "temperature=14.0")], False),
    "learnt": ([(DIVIDED, MULTIPLIED), ("= temperature\n", "= nn.Parameter(torch.ones(1) * temperature)\n")], False),
    "a loss": ([(DIVIDED, "(a - b).square().sum() * self.temperature")], False),
}

EPOCHS = """
class Dice:
    def __init__(self):
        self.values = []

    def __call__(self, p, y):
        self.values.append((p == y).float().mean())

    def aggregate(self):
        return sum(self.values) / len(self.values)

    def reset(self):
        self.values = []


def main(model, loader):
    metric = Dice()
    for epoch in range(9):
        for x, y in loader:
            metric(model(x), y)
        print(metric.aggregate())
        metric.reset()


main(None, None)
"""
RESET = "        metric.reset()\n"
METRICS = {
    "healthy": ([], False),
    "never": ([(RESET, "")], True),
    "made in each epoch": ([(RESET, ""), ("    for epoch in range(9):\n", "    for epoch in range(9):\n        metric = Dice()\n")], False),
    "one evaluation": ([(RESET, ""), ("    for epoch in range(9):\n        for x, y in loader:\n            metric(model(x), y)\n        print",
                                      "    for x, y in loader:\n        metric(model(x), y)\n    print")], False),
    "of a class without it": ([(RESET, ""), ("    def reset(self):\n        self.values = []\n", "")], False),
}  # fmt: skip

ITEMS = """
def sample(rows, n):
    seq, pos = np.zeros(n), np.zeros(n)
    k = n - 1
    after = rows[-1]
    for i in reversed(rows[:-1]):
        seq[k] = i
        pos[k] = after
        after = i
        k -= 1
    return seq, pos


sample(None, None)
"""
NEXT = "        pos[k] = after\n        after = i\n"
CARRIED = {
    "healthy": ([], False),
    "too early": ([(NEXT, "        after = i\n        pos[k] = after\n")], True),
    "a name for it": ([(NEXT, "        after = i\n        pos[k] = after\n"), ("    after = rows[-1]\n", "")], False),
    "a condition": ([(NEXT, "        if i:\n            after = i\n        pos[k] = after\n")], False),
    "not kept twice": ([(NEXT, "        after = i\n        pos[k] = after\n"), ("        seq[k] = i\n", "")], False),
}
UPSAMPLE = """
class Up(nn.Module):
    def __init__(self, r):
        super().__init__()
        self.r, self.conv, self.shuffle = r, nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(r)

    def forward(self, x):
        x = self.shuffle(self.conv(x))
        return x


Up(2)(None)
"""
SHUFFLE = "x = self.shuffle(self.conv(x))"
PIXELS = {
    "healthy": ([], False),
    "viewed": ([(SHUFFLE, "x = self.conv(x)\n        x = x.view(x.size(0), 1, x.size(2) * self.r, x.size(3) * self.r)")], True),
    "after others": ([(SHUFFLE, "r, y = self.r, x\n        x = self.conv(x.view(1, 1, 3, 3))\n        x, r = self.conv(x), self.r\n"
                                "        return x.view(x.size(0), 1, x.size(2) * r, x.size(3) * r)")], True),
    "in place": ([(SHUFFLE, "n, _, h, w = x.shape\n        x = torch.relu(self.conv(x)).reshape((n, 1, 2 * h, 2 * w))")], True),
    "written out": ([(SHUFFLE, "n, _, h, w = x.shape\n        x = self.conv(x).view(n, 1, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)\n"
                               "        x = x.reshape(n, 1, h * 2, w * 2)")], False),
    "flattened": ([(SHUFFLE, "x = self.conv(x)\n        x = x.view(x.size(0), 1, x.size(2) * x.size(3), 4)")], False),
}  # fmt: skip
ROLLOUT = """
def main(envs, agent, steps, gamma, next_obs, next_done):
    for step in range(steps):
        obs[step] = next_obs
        dones[step] = next_done
        next_obs, reward, next_done, _ = envs.step(agent(next_obs))
        rewards[step] = reward
    last = 0
    for t in reversed(range(steps)):
        if t == steps - 1:
            going, after = 1.0 - next_done, agent.value(next_obs)
        else:
            going = 1.0 - dones[t + 1]
            after = values[t + 1]
        delta = rewards[t] + gamma * after * going - values[t]
        advantages[t] = last = delta + gamma * going * last


main(*[None] * 6)
"""
BEFORE, GOING = "        dones[step] = next_done\n", "going = 1.0 - dones[t + 1]"
REWARD = "        rewards[step] = reward\n"
ENDED = {
    "healthy": ([], False),
    "the step before": ([(GOING, "going = 1.0 - dones[t]")], True),
    "stored after the step": ([(BEFORE, ""), (REWARD, REWARD + BEFORE), (GOING, "going = 1.0 - dones[t]")], False),
    "the step after": ([(BEFORE, ""), (REWARD, REWARD + BEFORE)], True),
    "no next value": (
        [(GOING, "going = 1.0 - dones[t]"), ("after = values[t + 1]", "after = agent.value(obs[t])")],
        False,
    ),
}
RULES = {
    "ends": (ROLLOUT, ENDED),
    "pixels": (UPSAMPLE, PIXELS),
    "shuffled": (UPDATE, SHUFFLED),
    "views": (VIEWS, VIEWED),
    "temperature": (CONTRAST, TEMPERATURES),
    "metric": (EPOCHS, METRICS),
    "carried": (ITEMS, CARRIED),
}


@pytest.mark.parametrize(("rule", "variant"), [(r, v) for r, (_, variants) in RULES.items() for v in variants])
def test_names_reads_the_source(rule, variant, tmp_path):
    source, variants = RULES[rule]
    hunks, wrong = variants[variant]
    (tmp_path / "train.py").write_text(patched(source, *hunks))
    found = names.check(tmp_path / "train.py")
    assert found["ok"] is not wrong, found


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
    assert (seen.repeated() is not None) == (kind == "single")


PLANTED = {p.id: p for half in (twentieth_set, twentieth_set_heldout) for p in half.BUGS}
CASES = {
    "spheres_unet3d--turned-about-other-axes": ("samples", "one draw for picture and mask"),
    "sasrec_sessions--always-last-item": ("targets", "every place predicts the last item"),
    "sasrec_sessions--filled-from-left": ("evaluated", "the evaluation pads at the other end"),
    "espcn_photos--flipped-apart": ("samples", "one draw for both"),
    "spheres_unet3d--dice-of-logits": ("loss-input", "an overlap is computed from probabilities"),
    "spheres_unet3d--last-window-missing": ("finite", "0 is divided by 0"),
}


@pytest.mark.verify
@pytest.mark.parametrize("id", CASES)
def test_guard_names_the_cause(id, tmp_path):
    check, cause = CASES[id]
    verdicts, output, _ = guard(script_of(PLANTED[id]), tmp_path, **{"--only": check})
    assert verdicts[check].blocks, output
    assert cause in output
