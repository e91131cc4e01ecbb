"""What the twenty-first set showed, beside what `names` reads: class maps that were interpolated, classes of a one-hot map moved by a view, rates
that rise anew in each epoch, an R² of 0."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import interpolate, max_pool2d
from torch.nn.functional import one_hot as of_torch
from trainworthy.guard.checks import behaviour
from trainworthy.guard.checks.progress import Row
from trainworthy.guard.measures.data.interpolated import fault, seams
from trainworthy.guard.measures.losses.moved_classes import MovedClasses
from trainworthy.guard.measures.losses.regression import Regression
from trainworthy.guard.measures.models import averages
from trainworthy.guard.measures.rates import restarted, unlikely
from trainworthy.guard.measures.scores import best_weights
from trainworthy.guard.measures.scores.printed_scores import Series


def discs(n=64, size=96):
    """Class maps with discs and rings of classes 1 and 2 on class 0."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    maps = torch.zeros(n, size, size)
    for one in maps:
        for label in (1, 2, 1, 2):
            y, x = torch.randint(12, size - 12, (2,), generator=draw)
            one[(rows - y) ** 2 + (columns - x) ** 2 < 144] = label
    return maps


def levels(n=64, places=8):
    """A smooth field in levels: between two levels are those between."""
    field = torch.randn(n, 1, places, places, generator=torch.Generator().manual_seed(0))
    return (2 * interpolate(field, size=48, mode="bicubic")[:, 0]).round().clamp(-4, 4) + 4


def outlined(n=64):
    """Class 1 is the outline of class 2, by design."""
    inside = (discs(n) > 0).float()
    return inside + (1 - max_pool2d(1 - inside, 3, 1, 1))


def smaller(maps, mode):
    return interpolate(maps[:, None], size=48, mode=mode, antialias=mode != "nearest")[:, 0].round().clamp(0, 2)


MAPS = {
    "as they are": (discs, False),
    "nearest": (lambda: smaller(discs(), "nearest"), False),
    "bilinear": (lambda: smaller(discs(), "bilinear"), True),
    "bicubic": (lambda: smaller(discs(), "bicubic"), True),
    "levels": (levels, False),
    "steep levels": (lambda: levels(places=16), False),
    "noise": (lambda: levels(places=48), False),
    "outlines": (outlined, False),
    "two classes": (lambda: (discs() > 0).float(), False),
}


@pytest.mark.parametrize("name", MAPS)
def test_interpolated_class_maps(name):
    make, wrong = MAPS[name]
    rows = [{"seams": seams(batch, 255)} for batch in make().long().split(8)]
    assert (fault(rows) is not None) == wrong


SEEN = MovedClasses()


def one_hot(mask, classes):
    out = of_torch(mask, classes)
    SEEN.note(out, inspect.currentframe().f_back)
    return out


def as_scores(scores, mask):
    return one_hot(mask, 3).view_as(scores)


def by_shape(scores, mask):
    return one_hot(mask, 3).float().sum() + one_hot(mask, 3).view(scores.shape)


def by_sizes(scores, mask):
    n, classes, h, w = scores.shape
    return one_hot(mask, 3).reshape(n, classes, h, w)


def permuted(scores, mask):
    return one_hot(mask, 3).permute(0, 3, 1, 2).reshape(scores.shape)


def flattened(scores, mask):
    return one_hot(mask, 3).view(-1, 3)


def rows(scores, mask):
    n, _, h, w = scores.shape
    return one_hot(mask, 3).view(n, h * w, 3)


def of_labels(scores, mask):
    return one_hot(mask[:, 0, 0], 3).view(len(mask), 3, 1, 1)


@pytest.mark.parametrize(
    ("use", "wrong"),
    [(as_scores, 1), (by_shape, 1), (by_sizes, 1), (permuted, 0), (flattened, 0), (rows, 0), (of_labels, 0)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_classes_of_a_one_hot_map_that_a_view_moves(use, wrong):
    SEEN.__init__()
    for _ in range(6):
        use(torch.randn(4, 3, 8, 6), torch.randint(3, (4, 8, 6)))
    assert (SEEN.fault() is not None) == bool(wrong)


def epochs(count, length):
    return [
        SimpleNamespace(training=True, ended=True, was_cut=False, steps=length, started=i * length)
        for i in range(count)
    ]


def warm(step, length=20):
    return 0.1 * (step + 1) / length if step < length else 0.05 * (1 + math.cos(math.pi * step / 160))


RISING = {
    "once": ([warm(i) for i in range(60)], False),
    "in each epoch": ([warm(i % 20) for i in range(60)], True),
    "set after the update": ([0.0001, *(warm(i % 20) for i in range(59))], True),
    "constant": ([0.1] * 60, False),
    "warm restarts": ([0.05 * (1 + math.cos(math.pi * (i % 20) / 20)) for i in range(60)], False),
    "a triangle": ([0.01 + 0.01 * min(i % 20, 20 - i % 20) for i in range(60)], False),
}


@pytest.mark.parametrize("name", RISING)
def test_a_warm_up_that_begins_anew(name):
    rates, wrong = RISING[name]
    assert (restarted(epochs(3, 20), [rates]) is not None) == wrong
    assert restarted(epochs(1, 20), [rates[:20]]) is None


@pytest.mark.parametrize("length", [40, 60, 150])
def test_a_warm_up_and_a_cosine_are_no_irregular_factors(length):
    assert unlikely([1e-4, *(warm(i, length // 2) for i in range(1, length))]) is None


@pytest.mark.parametrize(("now", "gains"), [(-0.01, False), (0.0, False), (0.2, True)])
def test_a_coefficient_of_determination_of_zero_is_no_gain(now, gains):
    row = Row(Series("r2", "fit", 1, False, [now]), [now], [-0.5])
    assert (row.learnt > 0) == gains


@pytest.mark.parametrize("seen_within", [True, False])
def test_noise_that_a_model_adds_itself(seen_within):
    """The model gets the sample alone. Where the calls within it were not recorded, nothing is known of the noise."""
    record = Regression()
    for _ in range(4):
        clean, noise = torch.rand(32, 1, 8, 8), torch.randn(32, 1, 8, 8)
        level = torch.rand(32, 1, 1, 1)
        noisy = (1 - level**2).sqrt() * clean + level * noise
        record.drew(noise)
        root = (torch.nn.Identity(), (clean,), {})
        inner = [(noisy, level.flatten())] if seen_within else []
        record.add(torch.zeros_like(noise, requires_grad=True), noise, root, [[clean]], inner)
    assert len(record.levels) == 4 * seen_within
    assert not record.strange
    assert not record.hidden.shares


@pytest.mark.parametrize(("evaluated_before", "stopped"), [(True, False), (False, True)])
def test_the_best_average_that_is_loaded_for_a_test(evaluated_before, stopped):
    """An average that was evaluated early and is loaded at the end holds more of the initial weights than the average has at the end."""
    torch.manual_seed(0)
    net, average = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    average.load_state_dict(net.state_dict())
    start = {id(p): (p, p.detach().flatten().clone()) for p in net.parameters()}
    goal, trail = torch.randn(16, 16), averages.Trail()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    trail.trains(net)
    best = {}
    for step in range(1, 61):
        optimizer.zero_grad()
        ((net.weight - goal) ** 2).sum().backward()
        optimizer.step()
        trail.step(list(net.parameters()))
        with torch.no_grad():
            for p, q in zip(average.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.1)
        if step in (1, 60) and (evaluated_before or step == 60):
            trail.evaluated(average, [net], start, step)
        if step == 1:
            best = {k: v.clone() for k, v in average.state_dict().items()}
    net.load_state_dict(best)
    trail.evaluated(net, [net], start, 60)
    assert (averages.fault(trail.found, 60, 60) is not None) == stopped


def test_an_average_of_statistics_whose_count_is_rounded_down():
    norm = torch.nn.BatchNorm2d(4)
    assert behaviour.initial(norm)
    norm.running_mean += 0.01
    assert int(norm.num_batches_tracked) == 0
    assert not behaviour.initial(norm)


@pytest.mark.parametrize(("average", "stopped"), [(10.7, False), (10.2, True)])
def test_the_best_of_a_score_that_does_not_change(average, stopped):
    """The script keeps the best of its average's accuracy, which does not change in a short run, and prints that of the model, too."""
    rows, output = [], ""
    for value in (10.7, 20.1, 33.0, 41.5, 52.2):
        begin = len(output)
        output += f"Test: Acc@1: {value}\nTest (EMA): Acc@1: {average}\n"
        rows.append({"output_span": [begin, len(output)], "best": {"best_metric": 10.7}})
    assert bool(best_weights.check(rows, output)[1]) == stopped
