"""Terms of a loss, views that mix axes, inverted weights, plateaus: healthy forms pass, each wrong one is told apart."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from trainworthy.guard.checks.causality import sees_the_same_place, unread
from trainworthy.guard.checks.loss import loss_input, targets
from trainworthy.guard.checks.schedules import contrary
from trainworthy.guard.measures.control import policy_rewards
from trainworthy.guard.measures.data.alignment import turned_apart
from trainworthy.guard.measures.losses import loss_terms
from trainworthy.guard.measures.losses.mixing import recovered
from trainworthy.guard.measures.losses.supervision import upside_down
from trainworthy.guard.measures.records import scrambled
from trainworthy.guard.observing.observer import Observer, kept_by_reference


def dice(p, y):
    return (2 * (p * y).sum((1, 2)) / (p + y).sum((1, 2))).mean()


def entropy(out):
    return -(out.softmax(1) * out.log_softmax(1)).sum(1).mean()


MASKS = {
    "bce + dice loss": (lambda o, y: F.binary_cross_entropy_with_logits(o, y) + 1 - dice(o.sigmoid(), y), False),
    "bce - log dice": (lambda o, y: F.binary_cross_entropy_with_logits(o, y) - dice(o.sigmoid(), y).log(), False),
    "a penalty of the outputs": (lambda o, y: F.binary_cross_entropy_with_logits(o, y) + o.pow(2).mean(), False),
    "bce + dice": (lambda o, y: F.binary_cross_entropy_with_logits(o, y) + dice(o.sigmoid(), y), True),
    "in accumulation": (lambda o, y: (F.binary_cross_entropy_with_logits(o, y) + dice(o.sigmoid(), y)) / 4, True),
}
CLASSES = {
    "cross-entropy": (lambda o, y: F.cross_entropy(o, y) + 0.1 * o.pow(2).mean(), False),
    "entropy bonus": (lambda o, y: F.cross_entropy(o, y) - 0.1 * entropy(o), False),
    "two losses": (lambda o, y: F.cross_entropy(o, y) + F.multi_margin_loss(o, y), False),
    "one of them subtracted": (lambda o, y: F.cross_entropy(o, y) - 0.5 * F.multi_margin_loss(o, y), True),
}


def told(form, draw) -> tuple[str, str] | None:
    torch.manual_seed(0)
    one = loss_terms.Terms()
    for _ in range(4):
        out, y = draw()
        out.requires_grad_(True)
        one.root(out)
        loss = form(out, y)
        one.look(loss, [torch.randn(4, 4), y])
        loss.backward()
    assert len(one.rows) >= 3 or not one.rows
    return loss_terms.check(one)[0]


@pytest.mark.parametrize("name", MASKS)
def test_terms_of_a_mask(name: str):
    form, wrong = MASKS[name]
    found = told(form, lambda: (0.1 * torch.randn(8, 12, 12), (torch.rand(8, 12, 12) > 0.7).float()))
    assert (found is not None) == wrong, found
    assert not wrong or "sign of a term" in found[1]


@pytest.mark.parametrize("name", CLASSES)
def test_terms_of_classes(name: str):
    form, wrong = CLASSES[name]
    assert (told(form, lambda: (0.1 * torch.randn(32, 5), torch.randint(0, 5, (32,)))) is not None) == wrong


def test_terms_of_a_trained_model_are_not_judged():
    """Its confidence is pushed down on purpose, and follows the targets."""

    def draw():
        y = torch.randint(0, 5, (32,))
        return 4 * F.one_hot(y, 5).float() + 0.1 * torch.randn(32, 5), y

    assert told(lambda o, y: F.cross_entropy(o, y) + 0.5 * o.max(1).values.mean(), draw) is None


VIEWS = {
    "columns by permute": (lambda f: f.permute(0, 3, 1, 2).reshape(4, 24, 64), False),
    "channels as places": (lambda f: f.reshape(4, 32, 48), False),
    "pixels by transpose": (lambda f: f.flatten(2).transpose(1, 2), False),
    "rows and channels as places": (lambda f: f.reshape(4, 64, 24), False),
    "columns by view": (lambda f: f.reshape(4, 24, 64), True),
    "pixels by view": (lambda f: f.reshape(4, 48, 32), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_that_mix_places_and_channels(name: str):
    make, wrong = VIEWS[name]
    f = torch.randn(4, 32, 2, 24, requires_grad=True) * 1.0
    for layer in (nn.Linear(8, 8), nn.LSTM(8, 8), nn.LayerNorm(8)):
        assert bool(scrambled(layer, (make(f),))) == wrong
    assert not scrambled(nn.ReLU(), (make(f),))


def test_heads_are_put_together_after_a_transpose():
    y = torch.randn(3, 4, 10, 6, requires_grad=True) * 1.0  # batch, heads, places, width
    assert not scrambled(nn.Linear(24, 24), (y.transpose(1, 2).reshape(3, 10, 24),))
    assert scrambled(nn.Linear(24, 24), (y.reshape(3, 10, 24),))


def test_weights_of_positives():
    share = [0.05, 0.1, 0.3, 0.6]
    right = [(1 - s) / s for s in share]
    for weight, wrong in (
        (right, False),
        ([1 / w for w in right], True),
        ([1.0] * 4, False),
        ([3.0, 1.0, 2.0, 1.5], False),
    ):
        found = upside_down([{"pos_weight": weight, "positive": share}] * 6)
        assert (found is not None) == wrong
    assert upside_down([{"pos_weight": [0.2] * 4, "positive": [0.17] * 4}] * 6) is not None
    assert upside_down([{"pos_weight": [5.0] * 4, "positive": [0.17] * 4}] * 6) is None
    assert upside_down([]) is None


@pytest.mark.parametrize(("line", "mode", "wrong"), [
    ("scheduler.step(val_loss)", "min", False),
    ("scheduler.step(val_loss)", "max", True),
    ("sched.step(m['mse'])", "max", True),
    ("scheduler.step(-val_loss)", "max", False),
    ("scheduler.step(val_acc)", "max", False),
    ("scheduler.step(val_acc)", "min", True),
    ("scheduler.step(1 - acc)", "min", False),
    ("scheduler.step(val_score)", "max", False),
    ("scheduler.step(metrics)", "max", False),
    ("lossless.step(accuracy if use_acc else loss)", "max", False),
])  # fmt: skip
def test_what_a_plateau_waits_for(line: str, mode: str, wrong: bool):
    assert (contrary({line: mode}) is not None) == wrong


def policy(*, other: bool, single: bool) -> tuple[str, str] | None:
    """The verdict on 200 steps of CartPole's kind: rewards of 1, episodes of 25 steps."""
    one, draw = policy_rewards.Credit(), np.random.default_rng(0)
    losses, returns = [], []
    for t in range(200):
        obs = draw.normal(size=3).astype("float32")
        if t % 25 == 0:
            one.seen(7, (obs, {}))
        else:
            one.seen(7, (obs, 1.0, t % 25 == 24, False, {}))
        action = int(draw.integers(0, 2))
        logits = torch.zeros(1 if not single else 2, 2)[0].requires_grad_(True)
        value = torch.tensor(int(draw.integers(0, 2)) if other else action)
        out = F.log_softmax(logits, 0)[value]
        one.asked = (torch.from_numpy(obs),)
        one.log_prob(out, value)
        one.play(7, (action,))
        losses.append(out)
        returns.append(25.0 - t % 25)
    weights = torch.tensor(returns)
    (-(weights - weights.mean()) * torch.stack(losses)).sum().backward()
    return policy_rewards.check(one)[0]


@pytest.mark.parametrize("single", [True, False])
def test_the_action_that_was_played(single: bool):
    assert policy(other=False, single=single) is None
    assert "keep the action" in policy(other=True, single=single)[1]


class Decoder(nn.Module):
    """Scores of each token, from the tokens before it or from the token itself."""

    def __init__(self, shift: int):
        super().__init__()
        self.shift, self.embedding, self.gru, self.out = (
            shift,
            nn.Embedding(20, 8),
            nn.GRU(8, 16, batch_first=True),
            nn.Linear(16, 20),
        )

    def forward(self, target_tensor):
        given = F.pad(target_tensor, (self.shift, 0))[:, : target_tensor.shape[1]]
        return self.out(self.gru(self.embedding(given))[0])


def test_a_decoder_that_shifts_its_targets_itself():
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (6, 12))
    for shift in (0, 1):
        model = Decoder(shift)
        seen = SimpleNamespace(copied=(model, (ids,), {}), control=True, busy=False)
        assert sees_the_same_place(seen) is (shift == 0)


def test_an_input_that_is_read_twice():
    torch.manual_seed(0)

    class Pair(nn.Module):
        def __init__(self, both: bool):
            super().__init__()
            self.both, self.body = both, nn.Linear(6, 4)

        def forward(self, a, b):
            return self.body(a), self.body(b if self.both else a)

    for both in (True, False):
        call = (Pair(both), (torch.randn(8, 6), torch.randn(8, 6)), {})
        assert unread(SimpleNamespace(several={0: call}, busy=False))["ok"] == both


@pytest.mark.parametrize("trains", [True, False])
def test_a_best_state_that_is_replaced_by_the_next_one(trains: bool):
    """At the end of the rehearsal the last one is too young to be judged: the one before it was held. A model that does not train
    any more (a client of federated averaging) may hold its own."""
    model, seen = nn.Linear(3, 2), Observer()
    best = None
    for step in (5, 20, 35):
        seen.steps = step
        if trains:
            with torch.no_grad():
                model.weight.add_(1.0)
        state = model.state_dict()
        seen.state(model, state)
        best = state
    assert seen.by_reference == (5 if trains else None)
    assert best is not None
    assert kept_by_reference(seen) is None


class Scenes(Dataset):
    """Bright corners on a noisy background, flipped and turned at random."""

    def __init__(self, *, augment: bool, apart: bool = False):
        self.augment, self.apart = augment, apart

    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int):
        draw = torch.Generator().manual_seed(i)
        mask = torch.zeros(16, 16)
        mask[2 : int(torch.randint(5, 9, (), generator=draw)), 3:13] = 1
        picture = torch.rand(3, 16, 16, generator=draw) + 0.6 * mask
        if self.augment:
            k, other = torch.randint(0, 4, (2,)).tolist()
            picture, mask = picture.rot90(k, (1, 2)), mask.rot90(other if self.apart else k)
        return {"image": picture, "mask": mask}


@pytest.mark.parametrize("apart", [False, True])
def test_masks_that_are_turned_apart(apart: bool):
    torch.manual_seed(0)
    train, val = DataLoader(Scenes(augment=True, apart=apart), 8), DataLoader(Scenes(augment=False), 8)
    found = turned_apart(train, {1: val}, float("inf"))
    assert (found is not None) == apart
    assert not apart or "one draw for both" in found[1]
    found = turned_apart(train, {}, float("inf"))  # the evaluation has no loader
    assert (found is not None) == apart
    faint = DataLoader(
        [
            {"image": 5 * torch.rand(3, 16, 16) + s["mask"], "mask": s["mask"]}
            for s in (train.dataset[i] for i in range(96))
        ],
        8,
    )
    assert turned_apart(faint, {}, float("inf")) is None  # the masks say little about the pictures


@pytest.mark.parametrize(
    ("form", "exchanged"), [("corners", False), ("corners", True), ("shares", False), ("shares", True)]
)
def test_boxes_whose_rows_and_columns_are_exchanged(form: str, exchanged: bool):
    torch.manual_seed(0)

    def scene():
        picture, size, at = 0.1 * torch.rand(3, 32, 32), torch.randint(6, 14, (2,)), torch.randint(0, 16, (2,))
        (left, top), (wide, high) = at.tolist(), size.tolist()
        picture[:, top : top + high, left : left + wide] += torch.rand(3, high, wide)
        box = torch.tensor([[left, top, left + wide, top + high]]).float()
        box = box[:, [1, 0, 3, 2]] if exchanged else box
        if form == "shares":
            box = torch.cat([torch.ones(1, 1), (box[:, :2] + box[:, 2:]) / 64, (box[:, 2:] - box[:, :2]) / 32], 1)
        return picture, {"boxes": box, "labels": torch.ones(1).long()}

    train, val = (DataLoader([scene() for _ in range(60)], 8) for _ in range(2))  # type: ignore[arg-type]
    found = turned_apart(train, {1: val}, float("inf"))
    assert bool(found) == exchanged
    assert not found or "rows and columns" in found[1]


def test_masks_that_stay_while_their_pictures_are_turned_by_any_angle():
    """Colours tell what is what here, not brightness."""
    torch.manual_seed(0)

    def pair(turn: bool, apart: bool):
        mask = torch.zeros(1, 24, 24)
        mask[:, 6 : 6 + int(torch.randint(6, 12, ())), 4 : 4 + int(torch.randint(4, 14, ()))] = 1
        colour = torch.tensor([0.2, 0.8, 0.5]).view(3, 1, 1)
        picture = torch.where(mask > 0, colour, 1 - colour) + 0.05 * torch.randn(3, 24, 24)
        angle = float(torch.empty(()).uniform_(40, 140)) if turn else 0.0
        return v2.functional.rotate(picture, angle), v2.functional.rotate(mask, 0.0 if apart else angle)[0]

    val = DataLoader([pair(False, False) for _ in range(48)], 8)
    assert turned_apart(DataLoader([pair(True, False) for _ in range(48)], 8), {1: val}, float("inf")) is None
    assert turned_apart(DataLoader([pair(True, True) for _ in range(48)], 8), {1: val}, float("inf")) is not None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_are_recovered_from_a_gradient(smoothing: float):
    torch.manual_seed(0)
    logits, soft = torch.randn(16, 10, requires_grad=True), torch.zeros(16, 10)
    rows = torch.arange(16)
    soft[rows, rows % 10] += 0.3
    soft[rows, (rows + 3) % 10] += 0.7
    goal = soft * (1 - smoothing) + smoothing / 10
    (-(goal * logits.log_softmax(1)).sum(1).mean() / 4).backward()
    torch.testing.assert_close(recovered(logits.detach(), logits.grad), soft, atol=1e-3, rtol=0)
    other = torch.randn(16, 10, requires_grad=True)
    other.pow(3).mean().backward()
    assert recovered(other.detach(), other.grad) is None


@pytest.mark.parametrize(
    ("raw", "blank", "words"), [(False, 0, ("", "")), (True, 0, ("log_softmax", "")), (False, 5, ("", "blank="))]
)
def test_ctc(raw: bool, blank: int, words: tuple[str, str]):
    torch.manual_seed(0)
    seen = Observer()
    for _ in range(4):
        out = torch.randn(12, 4, 6, requires_grad=True)
        given, target = out if raw else out.log_softmax(2), torch.randint(1, 6, (12,))
        seen.loss("ctc_loss", given, target, None, {"blank": blank})
    for found, word in zip((loss_input(seen), targets(seen)), words, strict=True):
        assert found.get("ok", True) == (not word), found
        assert word in found.get("cause", "")
