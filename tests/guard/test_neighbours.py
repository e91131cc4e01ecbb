"""The nearest other sample tells faults of the data from those of the model: classes of other samples, classes that are numbered otherwise,
pictures whose axes or channels were exchanged. Other differences of training and evaluation are left alone."""

import time

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch.utils.data import TensorDataset
from trainworthy.guard.measures.data import neighbours


def splits(seed: int, bunch=None, shape=(1, 8, 8)):
    """((inputs, classes) of training, the same of an evaluation, generator)."""
    bunch, g = bunch or load_digits(), torch.Generator().manual_seed(seed)
    x, y = torch.tensor(bunch.data, dtype=torch.float32).reshape(-1, *shape), torch.tensor(bunch.target)
    order = torch.randperm(len(y), generator=g)
    cut = int(0.6 * len(y))
    return (x[order[:cut]], y[order[:cut]]), (x[order[cut:]], y[order[cut:]]), g


def cause(train, held_out, outputs: int = 0) -> str:
    found = neighbours.check(TensorDataset(*train), [TensorDataset(*held_out)], time.monotonic() + 30, outputs)
    return found[1] if found else ""


def tinted(x, order=(0, 1, 2)):
    """Digits in a colour that depends on the picture, with the channels in an order."""
    pictures = torch.cat([x, 0.3 * x.flip(2), 16 - x], 1)
    return pictures[:, list(order)]


@pytest.mark.parametrize("seed", range(4))
def test_faults_of_the_data(seed: int):
    (x, y), (v, w), g = splits(seed)
    assert "of training are not those" in cause((x, y[torch.randperm(len(y), generator=g)]), (v, w))
    assert "of the evaluation are not those" in cause((x, y), (v, w[torch.randperm(len(w), generator=g)]))
    by_name = torch.tensor([8, 5, 4, 9, 1, 7, 6, 3, 2, 0])  # "eight", "five", ...
    assert "number their classes differently" in cause((x, y), (v, by_name.argsort()[w]))
    two = torch.arange(10)
    two[[4, 9]] = two[[9, 4]]
    assert "number their classes differently" in cause((x, y), (v, two[w]))
    assert "columns in another order" in cause((x.flatten(1), y), (v.flatten(1)[:, torch.randperm(64, generator=g)], w))
    assert "transposed" in cause((x, y), (v.transpose(2, 3), w))
    assert "upside down" in cause((x, y), (v.flip(2), w))
    by_class = torch.cat([y, w]).argsort(stable=True)
    every = torch.cat([x, v])[by_class], torch.cat([y, w])[by_class]
    assert "order of their classes" in cause(*([a[s] for a in every] for s in (slice(0, 1200), slice(1200, None))), 10)
    assert "order (2, 1, 0)" in cause((tinted(x), y), (tinted(v, (2, 1, 0)), w))


@pytest.mark.parametrize("seed", range(4))
def test_what_may_differ(seed: int):
    (x, y), (v, w), g = splits(seed)
    assert not cause((x, y), (v, w))
    assert not cause((tinted(x), y), (tinted(v), w))
    assert not cause((x / 16 - 0.5, y), (v, w))  # the evaluation may normalise in its loop
    for noise in (2, 5, 10):
        assert not cause((x + noise * torch.randn(x.shape, generator=g), y), (v, w))
    wrong = torch.randint(10, y.shape, generator=g)
    assert not cause((x, torch.where(torch.rand(len(y), generator=g) < 0.6, wrong, y)), (v, w))
    rare = (y < 3) | (torch.rand(len(y), generator=g) < 0.2)
    assert not cause((x[rare], y[rare]), (v, w))
    few = w < 4  # an evaluation on some of the classes
    assert not cause((x, y), (v[few], w[few]))
    assert not cause((x.roll(1, 3), y), (v, w))
    turned = torch.stack(
        [p.rot90(int(k), (1, 2)) for p, k in zip(x, torch.randint(4, y.shape, generator=g), strict=True)]
    )
    assert not cause((turned, y), (v, w))
    drawn = torch.randint(10, y.shape, generator=g), torch.randint(10, w.shape, generator=g)
    assert not cause((x, drawn[0]), (v, drawn[1]))
    assert not cause((x, torch.full_like(y, -1)), (v, w))  # unlabelled samples


def test_classes_that_are_held_out_on_purpose():
    (x, y), (v, w), _ = splits(0)
    seen, new = y < 7, w >= 7
    assert not cause((x[seen], y[seen]), (v[new], w[new]))  # a metric is learnt: the loss scores no classes
    assert not cause((x[seen], y[seen]), (v[new], w[new]), 7)  # the head has none of them
    assert not cause((x[y < 6], y[y < 6]), (v, w), 10)  # trained on them later
    assert "order of their classes" in cause((x[seen], y[seen]), (v[new], w[new]), 10)


def test_columns_and_texts():
    train, held_out, g = splits(0, load_breast_cancer(), (30,))
    assert not cause(train, held_out)
    assert "number their classes differently" in cause(train, (held_out[0], 1 - held_out[1]))
    words = torch.randint(0, 3000, (1200, 40), generator=g)
    topic = torch.randint(0, 4, (1200,), generator=g)
    words[:, :12] = topic[:, None] * 50 + torch.randint(0, 50, (1200, 12), generator=g)
    assert not cause((words[:800], topic[:800]), (words[800:], topic[800:]))
    assert "number" in cause((words[:800], topic[:800]), (words[800:], (topic[800:] + 1) % 4))


@pytest.mark.parametrize("seed", range(4))
def test_numbers(seed: int):
    bunch = load_breast_cancer()
    bunch.target, bunch.data = bunch.data[:, 2], bunch.data[:, 4:]  # a perimeter, from texture and shape
    (x, y), (v, w), g = splits(seed, bunch, (26,))
    y, w = y.float(), w.float()
    assert not cause((x, y), (v, w))
    assert not cause((x, (y - y.mean()) / y.std()), (v, w))
    assert not cause((x, y), (v, 1000 * w))  # predictions may be scaled back
    assert "of training are not those" in cause((x, y[torch.randperm(len(y), generator=g)]), (v, w))
    assert "of the evaluation are not those" in cause(
        (x, y[:, None]), (v, w[torch.randperm(len(w), generator=g)][:, None])
    )
    assert "opposite signs" in cause((x, y), (v, -w))
    hard = splits(seed, load_diabetes(), (10,))[:2]
    assert not cause(*((x, y.float()) for x, y in hard))
