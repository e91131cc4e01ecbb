"""What the data alone show: codes that were given anew, copies and windows in both splits, unknown words. Each stops what it is for, and is
quiet on its healthy twin and on what looks like it."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainworthy.guard.checks.samples import samples
from trainworthy.guard.hooks import events
from trainworthy.guard.measures.data import (
    columns,
    missing_codes,
    one_sample,
    overlapping_windows,
    repeated_rows,
    token_pairs,
)
from trainworthy.guard.measures.data.unknown_tokens import Lookups
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.rehearsals.control import Control, Plan


def loader(*tensors):
    return DataLoader(TensorDataset(*tensors), 32)


def cities(n: int, seed: int):
    rng = np.random.default_rng(seed)
    return (np.minimum(rng.geometric(0.02, n), 300) * 617) % 1000


def encoded(values, known):
    return torch.tensor([{v: i + 1 for i, v in enumerate(np.unique(known))}.get(v, 0) for v in values])


@pytest.mark.parametrize("seed", range(5))
def test_codes_of_the_evaluation_s_own_rows(seed: int):
    train, test = cities(4000, seed), cities(1000, 100 + seed)
    ours = encoded(train, train)
    assert missing_codes.renumbered(ours, encoded(test, test))
    assert missing_codes.renumbered(ours.float(), encoded(test, test).float())
    assert not missing_codes.renumbered(ours, encoded(test, train))
    # by frequency: what is missing is at the end
    rank = {v: i for i, v in enumerate(sorted(set(train), key=lambda v: -(train == v).sum()))}
    by_rank = [torch.tensor([rank.get(v, len(rank)) for v in x]) for x in (train, test)]
    assert not missing_codes.renumbered(*by_rank)


def test_one_row_of_each_user_is_no_new_code():
    rng = np.random.default_rng(0)
    users = torch.tensor(np.repeat(np.arange(300), rng.geometric(0.1, 300)))
    assert not missing_codes.renumbered(users, torch.arange(300))


def imbalanced(seed: int):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1100, 6, generator=draw), torch.arange(1100) < 100


def multiplied(x, y):
    rare = torch.arange(100).repeat(10)
    return torch.cat([x[~y], x[rare]]), torch.cat([torch.zeros(1000), torch.ones(1000)]).long()


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_class_that_was_multiplied_before_the_split(seed: int):
    x, y = multiplied(*imbalanced(seed))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    a, b = order[:1500], order[1500:]
    assert repeated_rows.check(loader(x[a], y[a]), [loader(x[b], y[b])], time.monotonic() + 10)


@pytest.mark.parametrize("seed", range(5))
def test_a_rare_class_that_was_multiplied_after_the_split(seed: int):
    x, y = imbalanced(seed)
    held = torch.arange(1100) % 4 == 0
    train = multiplied(torch.cat([x[y & ~held].repeat(2, 1)[:100], x[~y]]), torch.arange(1100) < 100)
    assert not repeated_rows.check(loader(*train), [loader(x[held], y[held].long())], time.monotonic() + 10)


def test_rows_that_repeat_by_nature_are_not_multiplied():
    draw = torch.Generator().manual_seed(0)
    kinds = torch.randn(40, 6, generator=draw)
    x = torch.cat([torch.randn(300, 6, generator=draw), kinds[torch.randint(40, (1700,), generator=draw)]])
    y = (torch.arange(2000) >= 300).long()
    order = torch.randperm(2000, generator=draw)
    a, b = order[:1000], order[1000:]
    assert not repeated_rows.check(loader(x[a], y[a]), [loader(x[b], y[b])], time.monotonic() + 10)


def series(n: int, columns: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, columns, generator=draw).cumsum(0)


@pytest.mark.parametrize(("columns", "stride"), [(1, 1), (3, 1), (3, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_overlapping_windows_that_were_split_at_random(columns: int, stride: int, seed: int):
    whole = series(2000, columns, seed)
    x = torch.stack([whole[i : i + 24] for i in range(0, 1970, stride)])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = int(0.8 * len(x))
    check = lambda a, b: overlapping_windows.check(loader(x[a]), [loader(x[b])], time.monotonic() + 20)  # noqa: E731
    assert check(order[:cut], order[cut:])
    assert not check(torch.arange(cut), torch.arange(cut, len(x)))
    assert not check(torch.cat([torch.arange(cut // 2), torch.arange(cut, len(x))]), torch.arange(cut // 2, cut))


def test_windows_without_overlap_may_be_split_at_random():
    x = series(4800, 2, 0).view(200, 24, 2)
    assert not overlapping_windows.check(loader(x[::2]), [loader(x[1::2])], time.monotonic() + 10)
    still = torch.zeros(400, 24, 2)
    assert not overlapping_windows.check(loader(still[:300]), [loader(still[300:])], time.monotonic() + 10)


def lookups(ids, table):
    one = Lookups()
    for part in ids.split(32):
        one.entries([part])
        one.look(part, table)
    return one.fault()


@pytest.mark.parametrize("seed", range(5))
def test_texts_of_unknown_words(seed: int):
    draw, table = torch.Generator().manual_seed(seed), torch.zeros(2000, 4)
    words = (1500 * torch.rand(320, 24, generator=draw) ** 4).long() + 2
    words[:, 18:] = 0
    assert lookups(torch.where((words > 40) & (words > 0), 1, words), table)
    assert not lookups(words, table)  # a usual text
    padded = words.clone()
    padded[:, 6:] = 0
    assert not lookups(padded.repeat(4, 1), table)  # short texts
    runs = torch.where(torch.arange(24)[None] % 12 < 9, 1, words)
    assert not lookups(runs, table)  # the background of a picture


def texts(n: int, seed: int) -> list[list[str]]:
    """Sentences in which one word makes some others likely."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        words = [int(rng.integers(60))]
        while len(words) < 12:
            words.append((words[-1] * 7 + int(rng.integers(6))) % 60)
        found.append([f"w{w}" for w in words])
    return found


def test_an_evaluation_with_a_vocabulary_of_its_own():
    train, val = texts(1000, 0), texts(300, 1)

    def encode(some, of):
        ids = {w: i for i, w in enumerate(dict.fromkeys(w for text in of for w in text))}
        return [(torch.tensor([ids[w] for w in text]), 0) for text in some]

    ours = encode(train, train)
    assert token_pairs.check(ours, [encode(val, train)], float("inf")) is None
    measured, cause = token_pairs.check(ours, [encode(val, val)], float("inf"))
    assert "100% of the tokens are known" in measured
    assert "from the training texts" in cause
    # the evaluation is a later part of one text, read in windows that overlap
    book = torch.tensor([i for x, _ in encode(texts(400, 2), train) for i in x.tolist()])
    windows = [(book[i : i + 32], 0) for i in range(0, len(book) - 32, 4)]
    assert token_pairs.check(windows[:900], [windows[910:]], float("inf")) is None


def test_columns_of_several_units_that_one_mean_and_deviation_scaled():
    rng = np.random.default_rng(0)
    table = np.stack(
        [rng.gamma(6, 25, 900), rng.normal(5, 1, 900), rng.normal(1960, 30, 900), rng.gamma(3, 200, 900)], 1
    )

    def rows(x):
        return TensorDataset(torch.tensor(x, dtype=torch.float32), torch.zeros(len(x)))

    measured, cause = columns.check(rows((table - table.mean()) / table.std()), [], float("inf"))
    assert "column 2 makes" in measured
    assert "axis=0" in cause
    whole = (table - table.mean(0)) / table.std(0)
    components = whole @ np.linalg.svd(whole, full_matrices=False)[2].T * np.array([9, 1, 0.2, 0.05])
    steps = rng.normal(size=(900, 40)).cumsum(1)
    pixels = np.clip(rng.normal(-1, 2, (900, 60)) + 4 * (np.arange(60) > 40), 0, 16)
    for healthy in (table, whole, components, steps, pixels):
        assert (
            columns.check(rows((healthy - healthy.mean()) / healthy.std()), [], float("inf")) is None
            or healthy is table
        )
    assert columns.check(rows(whole), [], float("inf")) is None


@pytest.mark.parametrize(("targets", "fault"), [(True, True), (False, False)])
def test_features_of_the_training_samples_are_no_evaluation_on_them(targets: bool, fault: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(320, 8), torch.randint(0, 3, (320,))
    seen = Observer(Control(Plan("watch"), print))
    events.install(seen)
    try:
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.no_grad():
                for batch in loader(x, y) if targets else loader(x):
                    model(batch[0])
            for a, b in DataLoader(TensorDataset(x, y), 32, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(a), b).backward()
                optimizer.step()
    finally:
        events.remove()
    found = samples(seen)
    assert ("of the validation samples are training samples" in found["measured"]) == fault, found


@pytest.mark.parametrize(
    ("kind", "fault"), [("first row", True), ("drawn", False), ("sorted", False), ("small", False)]
)
def test_batches_of_one_sample(kind: str, fault: bool):
    x, y = torch.randn(12, 16, 8 if kind == "small" else 64), torch.randint(0, 5, (12, 16))
    if kind in ("first row", "small"):
        x = x[:, :1] + 0.3 * x
    elif kind == "sorted":  # by class
        y = torch.arange(12)[:, None].expand(12, 16)
        x = 3 * torch.randn(12, 64)[:, None] + x
    assert bool(one_sample.fault(list(zip(x, y, strict=True)))) == fault


class Windows(torch.utils.data.Dataset):
    def __init__(self, series):
        self.series = torch.as_tensor(series).float()

    def __len__(self):
        return len(self.series) - 24

    def __getitem__(self, i):
        return self.series[i : i + 20], self.series[i + 20 : i + 24]


@pytest.mark.parametrize(("width", "own", "fault"), [(1, True, True), (7, True, True), (7, False, False)])
def test_a_series_that_each_split_scales_by_its_own(width: int, own: bool, fault: bool):
    rng = np.random.default_rng(0)
    whole = np.cumsum(rng.normal(size=(900, width)), 0)
    train, val = whole[:600], whole[580:]
    scaled = [(x - y.mean(0)) / y.std(0) for x, y in ((train, train), (val, val if own else train))]
    found = columns.check(*(Windows(scaled[0]), [Windows(scaled[1]), Windows(scaled[0])]), time.monotonic() + 60)
    assert bool(found) == fault
