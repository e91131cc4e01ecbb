"""Checks of targets, weights and frozen parts on small tensors: each stops what it is for, and is quiet on its healthy twin."""

import math
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from trainworthy.guard.checks.causality import orderless, unread
from trainworthy.guard.checks.graph import gradients
from trainworthy.guard.checks.loss import loss_input
from trainworthy.guard.checks.objectives import noise
from trainworthy.guard.checks.schedules import by_hand
from trainworthy.guard.hooks import events, initial_weights, patches
from trainworthy.guard.measures.data import columns
from trainworthy.guard.measures.losses import supervision
from trainworthy.guard.measures.losses.log_scales import LogScales
from trainworthy.guard.measures.losses.logits import Logits
from trainworthy.guard.measures.losses.moved_classes import MovedClasses
from trainworthy.guard.measures.losses.output_ranges import OutputRanges
from trainworthy.guard.measures.losses.overlaps import Overlaps
from trainworthy.guard.measures.losses.targets import describe
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.rehearsals.control import Control, Plan


@pytest.mark.parametrize(("power", "stopped"), [(1.0, True), (-1.0, False), (0.0, False)])
def test_weights_of_a_sampler_and_of_a_loss(power: float, stopped: bool):
    torch.manual_seed(0)
    y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 2000, replacement=True)
    weight = torch.bincount(y).float() ** power
    loader = DataLoader(TensorDataset(y), 50, sampler=WeightedRandomSampler(weight[y], len(y)))
    assert bool(supervision.sampler_weights([SimpleNamespace(loader=loader)])) == stopped
    rows = [describe("cross_entropy", torch.randn(100, 3), t, {"weight": weight}, None) for t in y.view(-1, 100)]
    assert bool(supervision.class_weights(rows)) == stopped


@pytest.mark.parametrize("own", [True, False])
def test_soft_targets_of_other_samples(own: bool):
    torch.manual_seed(0)
    one = supervision.Soft()
    for _ in range(12):
        y = torch.randint(0, 10, (64,))
        teacher = 3 * F.one_hot(y, 10) + torch.randn(64, 10)
        one.note((teacher if own else teacher[torch.randperm(64)]).softmax(1), [torch.randn(64, 8), y])
    assert (supervision.contradiction(one) is None) == own


class Tokens(nn.Module):
    def __init__(self, places: bool):
        super().__init__()
        self.places, self.embed = places, nn.Embedding(50, 16)
        self.position = nn.Embedding(12, 16)
        self.body = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 50)

    def forward(self, ids):
        where = torch.arange(ids.shape[1])[None] if self.places else torch.zeros_like(ids)
        return self.out(self.body(self.embed(ids) + self.position(where)))


@pytest.mark.parametrize("places", [True, False])
def test_a_model_that_knows_no_order(places: bool):
    torch.manual_seed(0)
    call = (Tokens(places), (torch.randint(0, 50, (6, 12)),), {})
    assert orderless(SimpleNamespace(masked=call, busy=False))["ok"] == places


@pytest.mark.parametrize("everywhere", [True, False])
def test_tokens_that_are_masked_and_not_predicted(everywhere: bool):
    torch.manual_seed(0)
    model, rows = Tokens(True), []
    for _ in range(4):
        ids = torch.randint(4, 50, (16, 12))
        chosen = torch.rand(ids.shape) < 0.15
        given = torch.where((torch.rand(ids.shape) < 0.8) & (chosen | everywhere), 3, ids)
        target = torch.where(chosen, ids, -100)
        rows.append(describe("cross_entropy", torch.randn(192, 50), target.flatten(), {}, (model, (given,), {})))
    assert bool(supervision.masked_elsewhere(rows)) == everywhere


@pytest.mark.parametrize(("high", "stopped"), [(1.0, False), (1 / 255, True), (0.9, False)])
def test_masks_that_were_scaled_twice(high: float, stopped: bool):
    target = (torch.rand(8, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3) * high
    row = describe("binary_cross_entropy_with_logits", torch.zeros_like(target), target, {}, None)
    assert bool(supervision.tiny_targets([row] * 5)) == stopped


@pytest.mark.parametrize("dim", [0, 1])
def test_log_softmax_over_the_batch(dim: int):
    torch.manual_seed(0)
    log_p = torch.randn(32, 10).log_softmax(dim)
    row = describe("kl_div", log_p, torch.randn(32, 10).softmax(1), {}, None)
    seen = SimpleNamespace(
        calls=[row] * 4,
        evidence=SimpleNamespace(
            output_ranges=OutputRanges(),
            log_scales=LogScales(),
            turned=Counter(),
            logits=Logits(),
            overlaps=Overlaps(),
            moved_classes=MovedClasses(),
        ),
    )
    assert loss_input(seen)["ok"] == (dim == 1)


@pytest.mark.parametrize("kind", ["random", "loaded", "copied", "trained", "adapter"])
def test_a_frozen_part_that_was_never_loaded(kind: str):
    one = initial_weights.Drawn()
    initial_weights.install(one)
    try:
        model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3))
    finally:
        patches.remove()
    for p in model[:4].parameters() if kind != "trained" else ():
        p.requires_grad_(False)
    if kind == "adapter":
        model[0].scale = nn.Linear(30, 1)
    if kind == "loaded":
        model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
    if kind == "copied":
        for p in model[:4].parameters():
            p.data.copy_(torch.randn_like(p))
    received = {id(p) for p in model.parameters() if p.requires_grad}
    assert bool(initial_weights.frozen_base(one, [model], received)) == (kind == "random")


class Timed(nn.Module):
    """Adds the embedding of a time, or forgets to."""

    def __init__(self, adds: bool):
        super().__init__()
        self.adds, self.body, self.time = adds, nn.Linear(6, 6), nn.Embedding(100, 6)

    def forward(self, x, t, lengths=None):
        wide = self.time(t)
        return F.dropout(self.body(x + wide if self.adds else x), 0.1, self.training)


@pytest.mark.parametrize("adds", [True, False])
def test_an_input_that_is_never_used(adds: bool):
    torch.manual_seed(0)
    call = (Timed(adds).train(), (torch.randn(8, 6), torch.randint(0, 100, (8,)), torch.arange(8)), {})
    assert unread(SimpleNamespace(several={0: call}, busy=False))["ok"] == adds


@pytest.mark.parametrize(("length", "fault"), [(400, ""), (100, "micro-batches"), (4000, ""), (40, "micro-batches")])
def test_a_rate_that_the_loop_computes(length: int, fault: str):
    def get_lr(step: int) -> float:
        if step < 10:
            return 1e-3 * (step + 1) / 10
        return 1e-4 + 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 10) / (length - 10)))) * 9e-4

    group = SimpleNamespace(steps=30, ref=lambda: True, rates=[get_lr(i) for i in range(30)])
    found = by_hand(SimpleNamespace(groups={0: group}, rates_by_hand=[lambda x: x, get_lr], planned=400))
    assert fault in found["cause"] if fault else found["ok"], found
    other = by_hand(SimpleNamespace(groups={0: group}, rates_by_hand=[lambda x: 2 * get_lr(x)], planned=400))
    assert "skip" in other


@pytest.mark.parametrize("kind", ["healthy", "codes", "scaled", "drifted"])
def test_columns_of_the_evaluation(kind: str):
    torch.manual_seed(0)
    codes = torch.multinomial(torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]), 4000, replacement=True)
    numbers = torch.randn(4000, 4) * 3 + 1
    train, test = slice(3000), slice(3000, None)
    numbers = (numbers - numbers[train].mean(0)) / numbers[train].std(0)
    held, values = codes[test].clone(), numbers[test].clone()
    if kind == "codes":
        held = torch.tensor([3, 5, 0, 1, 2, 4])[held]
    if kind == "scaled":
        values = (values - values.mean(0)) / values.std(0)
    if kind == "drifted":
        held[: len(held) // 2] = 2
    data = [TensorDataset(codes[train, None], numbers[train]), TensorDataset(held[:, None], values)]
    found = columns.check(data[0], data[1:], time.monotonic() + 10)
    assert bool(found) == (kind in ("codes", "scaled")), found


class Denoiser(nn.Module):
    """Adds noise and returns its own loss."""

    def __init__(self, share: torch.Tensor):
        super().__init__()
        self.share, self.net, self.time = share, nn.Linear(16, 16), nn.Embedding(len(share), 16)
        self.inner = nn.Sequential(self.net)

    def forward(self, x):
        t = torch.randint(0, len(self.share), (len(x),))
        kept, noise = self.share[t][:, None], torch.randn_like(x)
        return F.mse_loss(noise, self.inner(kept.sqrt() * x + (1 - kept).sqrt() * noise))


@pytest.mark.parametrize("cumulated", [True, False])
def test_noise_of_a_model_that_returns_its_loss(cumulated: bool):
    """A scalar output once ended all records after the first call."""
    torch.manual_seed(0)
    share = 1 - torch.linspace(1e-3, 0.15, 50)
    seen = Observer(Control(Plan("watch"), print))
    events.install(seen)
    try:
        model = Denoiser(share.cumprod(0) if cumulated else share)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for (x,) in DataLoader(TensorDataset(torch.rand(640, 16)), 64):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    finally:
        events.remove()
    assert seen.evidence.error == ""
    found = noise(seen)
    assert found["ok"] == cumulated, found
    assert "noisy inputs" in found["measured"]


def padded_batch(pad_class: int, *, elsewhere: bool = True) -> list[dict]:
    """Batches of tokens (8, 12), padded with 0, whose targets are padded with a class."""
    torch.manual_seed(0)
    rows = []
    for _ in range(6):
        ids, target = torch.randint(1, 50, (8, 12)), torch.randint(0, 3, (8, 12))
        target = target if elsewhere else target.clamp_min(1)
        for i, length in enumerate((12, 11, 9, 8, 8, 7, 5, 4)):
            ids[i, length:], target[i, length:] = 0, pad_class
        rows.append({"padded": supervision.padded(ids, target.flatten(), -100)})
    return rows


def test_padding_with_a_real_class_is_a_fault_and_with_a_number_of_its_own_is_not() -> None:
    assert "192 of 576 scored targets" in supervision.padding_scored(padded_batch(0))[0]
    assert supervision.padding_scored(padded_batch(-100)) is None
    assert supervision.padding_scored(padded_batch(0, elsewhere=False)) is None  # the class of padding alone


def test_tokens_that_fill_rows_and_are_found_elsewhere_are_no_padding() -> None:
    ids, target = torch.randint(0, 4, (8, 12)), torch.randint(0, 3, (96,))
    ids[:4, 6:] = 0
    assert supervision.padded(ids, target, -100) is None


def masks(kind: str) -> torch.Tensor:
    """Eight masks (8, 1, 32, 32) of four squares each."""
    mask = torch.zeros(8, 1, 32, 32)
    for i, (y, x) in enumerate(((2, 2), (2, 18), (18, 2), (18, 18)), start=1):
        mask[..., y : y + 10, x : x + 10] = i / 4 if kind == "numbers" else 1
    if kind == "resized":
        mask = torch.nn.functional.interpolate(mask, 48, mode="bilinear", antialias=True)
    return mask * 0.9 + 0.05 if kind == "smoothed" else mask


@pytest.mark.parametrize("kind", ["ones", "numbers", "resized", "smoothed"])
def test_masks_that_hold_numbers_of_objects_are_a_fault(kind: str) -> None:
    rows = [{"plateaus": supervision.plateaus(masks(kind))}] * 6
    assert (supervision.numbered_masks(rows) is not None) == (kind == "numbers")


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_that_the_loop_sets_itself_are_those_of_one_step(steps: int) -> None:
    torch.manual_seed(0)
    seen = Observer(Control(Plan("watch"), print))
    events.install(seen)
    try:
        model = nn.Linear(8, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in DataLoader(TensorDataset(torch.randn(640, 8), torch.randint(0, 3, (640,))), 32):
            optimizer.zero_grad()
            found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            for p, g in zip(model.parameters(), found, strict=True):
                p.grad = g.clone()
            for _ in range(steps):
                optimizer.step()
    finally:
        events.remove()
    assert gradients(seen)["ok"] == (steps == 1), gradients(seen)
    assert seen.passes[0].training
