"""Shapes of the official examples of transformers, diffusers, TRL, Accelerate and torchvision."""

import pytest

from tests.guard.guarding import guard

AHEAD = """
import torch
from torch import nn
from torch.nn.functional import kl_div, mse_loss
torch.manual_seed(0)

def ahead(loader):
    batches = iter(loader)
    now = next(batches)
    for later in batches:
        yield now
        now = later
    yield now

def loader(*tensors, size=16, shuffle=True):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), size, shuffle=shuffle)

x = torch.randn(3200, 8)
w = torch.randn(8, 4)
"""
"""A loop that fetches a batch while the one before is used, as Accelerate and CUDA prefetchers do."""

REGRESSION = (
    AHEAD
    + """
y = x @ torch.linspace(-1, 1, 8) + 0.1 * torch.randn(3200)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(4):
    model.train()
    for a, b in ahead(loader(x[:1200], y[:1200])):
        optimizer.zero_grad()
        mse_loss(model(a), b).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print("mse", sum(float(mse_loss(model(a), b)) for a, b in ahead(loader(x[1200:], y[1200:], size=50, shuffle=False))))
"""
)

DISTILLED = (
    AHEAD
    + """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    for a, b in ahead(loader(x, (x @ w).argmax(1), size=32)):
        target = (4 * a @ w).softmax(1)
        optimizer.zero_grad()
        kl_div(model(a).log_softmax(1), target, reduction="batchmean").backward()
        optimizer.step()
"""
)

DENOISED = (
    AHEAD
    + """
shares = torch.cumprod(1 - torch.linspace(1e-3, 0.1, 100), 0)
pictures = torch.randn(800, 1, 1, 1) + torch.linspace(-1, 1, 64).view(1, 1, 8, 8)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.time, self.last = nn.Conv2d(1, 16, 3, padding=1), nn.Embedding(100, 16), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x, t):
        return self.last(nn.functional.silu(self.first(x) + self.time(t)[:, :, None, None]))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    for (a,) in ahead(loader(pictures, size=16)):
        noise, t = torch.randn_like(a), torch.randint(100, (len(a),))
        share = shares[t].view(-1, 1, 1, 1)
        optimizer.zero_grad()
        mse_loss(model(share.sqrt() * a + (1 - share).sqrt() * noise, t), noise).backward()
        optimizer.step()
"""
)


LATENT = DENOISED.replace(
    "model = Net()", "encoder = nn.Conv2d(1, 4, 3, padding=1).requires_grad_(False)\nmodel = Net()"
).replace("        noise, t =", "        a = encoder(a)\n        noise, t =")
LATENT = LATENT.replace("nn.Conv2d(1, 16", "nn.Conv2d(4, 16").replace("nn.Conv2d(16, 1,", "nn.Conv2d(16, 4,")
"""The samples that are noised are an encoder's outputs."""


def test_noise_in_latents_is_compared_with_the_time_of_the_net(tmp_path):
    verdicts, printed, _ = guard(LATENT, tmp_path / "a", interventions=False)
    assert verdicts["noise"].verdict == "pass", printed
    wrong = LATENT.replace("noise, t), noise)", "noise, torch.randint(100, (len(a),))), noise)")
    verdicts, printed, _ = guard(wrong, tmp_path / "b", interventions=False)
    assert "the time step is drawn twice" in verdicts["noise"].remedy, printed
    wrong = LATENT.replace("t), noise)", "t), torch.randn_like(a))")
    verdicts, printed, _ = guard(wrong, tmp_path / "c", interventions=False)
    assert "the noise is drawn twice" in verdicts["noise"].remedy, printed
    velocity = LATENT.replace("t), noise)", "t), share.sqrt() * noise - (1 - share).sqrt() * a)")
    verdicts, printed, _ = guard(velocity, tmp_path / "d", interventions=False)
    assert not verdicts["noise"].blocks, printed


@pytest.mark.parametrize("check", ["targets", "noise"])
def test_a_loop_may_fetch_its_batches_ahead(check: str, tmp_path):
    """Soft targets are compared with the labels of their own batch, and noised inputs with their own samples."""
    verdicts, printed, _ = guard({"targets": DISTILLED, "noise": DENOISED}[check], tmp_path, interventions=False)
    assert not [v for v in verdicts.values() if v.blocks], printed
    assert check == "targets" or "noisy inputs" in verdicts["noise"].measured, printed


def test_faults_are_found_where_a_loop_fetches_ahead(tmp_path):
    wrong = DISTILLED.replace("(4 * a @ w)", "(4 * a.flip(0) @ w)")
    verdicts, printed, _ = guard(wrong, tmp_path / "a", interventions=False)
    assert "soft targets are those of other samples" in verdicts["targets"].remedy, printed
    wrong = DENOISED.replace("(1 - share).sqrt() * noise", "(1 - share) * noise")
    verdicts, printed, _ = guard(wrong, tmp_path / "b", interventions=False)
    assert "sqrt() is missing" in verdicts["noise"].remedy, printed


def test_outputs_of_an_evaluation_meet_their_own_targets(tmp_path):
    """One batch was fetched ahead: its numbers are not those of the outputs."""
    verdicts, printed, _ = guard(REGRESSION, tmp_path)
    assert verdicts["signal"].verdict == "pass", printed


SLOW = """
import time, torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = [(torch.randn(4), i % 2) for i in range(600)]
for epoch in range(3):
    for x, y in torch.utils.data.DataLoader(data, 10, shuffle=True):
        time.sleep(0.3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        print(sum(int((model(x).argmax(1) == y).sum()) for x, y in torch.utils.data.DataLoader(data[:80], 10)))
"""


def test_a_slow_script_is_followed_to_its_evaluation(tmp_path):
    """Its 40 steps take as long as the wait for an evaluation."""
    verdicts, printed, _ = guard(SLOW, tmp_path, interventions=False)
    assert "model.eval() is missing" in verdicts["modes"].remedy, printed


OWN_CLASS = """
import torch
from collections import UserDict
from torch import nn
torch.manual_seed(0)

class Batch(UserDict):
    def __init__(self, data, note):
        super().__init__(data)
        self.note = note

def collate(rows):
    return Batch({"x": torch.stack([r[0] for r in rows]), "labels": torch.stack([r[1] for r in rows])}, "own")

x = torch.randn(800, 8)
y = (x @ torch.randn(8, 3)).argmax(1)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
rows = list(zip(x, y))
for epoch in range(4):
    for batch in torch.utils.data.DataLoader(rows[:600], 16, shuffle=True, collate_fn=collate):
        assert batch.note == "own"
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["labels"]).backward()
        optimizer.step()
    with torch.no_grad():
        test = torch.utils.data.DataLoader(rows[600:], 50, collate_fn=collate)
        hits = sum(int((model(b["x"]).argmax(1) == b["labels"]).sum()) for b in test)
    print("accuracy", hits / 200)
"""
"""A batch of a class that is a dictionary by another name, as tokenizers of transformers return."""


def test_batches_may_be_of_a_class_of_their_own(tmp_path):
    verdicts, printed, _ = guard(OWN_CLASS, tmp_path / "a")
    assert [verdicts[k].verdict for k in ("overfit", "signal", "metric")] == ["pass"] * 3, printed
    wrong = OWN_CLASS.replace('batch["labels"])', 'batch["labels"][torch.randperm(len(batch["x"]))])')
    verdicts, printed, _ = guard(wrong, tmp_path / "b")
    assert any(v.blocks for v in verdicts.values()), printed


READ_BEFORE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
weights = filter(lambda p: p.requires_grad, model.parameters())
optimizer = torch.optim.AdamW(weights, 1e-3)
for x, y in torch.utils.data.DataLoader([(torch.randn(4), i % 2) for i in range(200)], 8, shuffle=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
"""
"""diffusers' train_text_to_image_lora.py of August 2026: what is clipped was read by the optimiser."""


def test_an_iterator_that_was_read_is_not_clipped(tmp_path):
    verdicts, printed, _ = guard(READ_BEFORE, tmp_path / "a", interventions=False)
    assert "clipping got no parameters" in verdicts["clipping"].measured, printed
    healthy = READ_BEFORE.replace("filter(lambda p: p.requires_grad, model.parameters())", "list(model.parameters())")
    verdicts, printed, _ = guard(healthy, tmp_path / "b", interventions=False)
    assert verdicts["clipping"].verdict == "pass", printed


AVERAGE = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(900, 8)
y = (x @ torch.randn(8, 3)).argmax(1)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average = [p.detach().clone() for p in model.parameters()]
data = torch.utils.data.TensorDataset(x, y)
for epoch in range(3):
    for a, b in torch.utils.data.DataLoader(data, 16, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        for m, p in zip(average, model.parameters()):
            m.lerp_(p.detach(), 0.1)
    stored = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for m, p in zip(average, model.parameters()):
            p.copy_(m)
        print(sum(int((model(a).argmax(1) == b).sum()) for a, b in torch.utils.data.DataLoader(data, 50)))
        for s, p in zip(stored, model.parameters()):
            p.copy_(s)
"""
"""diffusers' EMAModel: store, copy_to and restore around the evaluation."""


def test_an_average_that_is_copied_into_the_model_is_updated(tmp_path):
    verdicts, printed, _ = guard(AVERAGE, tmp_path / "a", interventions=False)
    assert verdicts["evaluated"].verdict == "pass", printed
    verdicts, printed, _ = guard(
        AVERAGE.replace("m.lerp_(p.detach(), 0.1)", "pass"), tmp_path / "b", interventions=False
    )
    assert "initial weights" in verdicts["evaluated"].measured, printed


WARM_UP = """
import torch
from torch import nn
epochs = 2
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.02)
loader = torch.utils.data.DataLoader([(torch.randn(4), i % 2) for i in range(160)], 2, shuffle=True)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.001, total_iters=len(loader) - 1)
for epoch in range(epochs):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if i == 20:
            raise SystemExit  # the rehearsal of a slow script ends here
"""
"""torchvision's detection: the rate warms up for the first epoch."""


def test_an_epoch_that_was_not_seen_to_its_end_has_the_length_of_its_loader(tmp_path):
    verdicts, printed, _ = guard(WARM_UP, tmp_path / "a", interventions=False)
    assert verdicts["schedule"].verdict == "pass", printed
    wrong = WARM_UP.replace("len(loader) - 1", "10 * len(loader)")
    verdicts, printed, _ = guard(wrong, tmp_path / "b", interventions=False)
    assert "warm-up is longer" in verdicts["schedule"].remedy, printed


PREFERENCES = """
import copy, torch
from torch import nn
torch.manual_seed(0)
policy = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
data = torch.randint(32, (400, 2, 8))

def loss(x):
    flat = x.flatten(0, 1)
    one = policy(flat)[:, :-1].log_softmax(-1).gather(2, flat[:, 1:, None]).sum((1, 2))
    with torch.no_grad():
        two = reference(flat)[:, :-1].log_softmax(-1).gather(2, flat[:, 1:, None]).sum((1, 2))
    return -nn.functional.logsigmoid((one - two).view(-1, 2).diff(dim=1)).mean()

for epoch in range(3):
    for x in torch.utils.data.DataLoader(data[:320], 8, shuffle=True):
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()
    with torch.no_grad():
        print(sum(float(loss(x)) for x in torch.utils.data.DataLoader(data[320:], 8)))
"""
"""TRL's DPO: the evaluation compares the policy with a reference that stays as it was."""


def test_a_reference_beside_the_model_is_no_stale_copy(tmp_path):
    verdicts, printed, _ = guard(PREFERENCES, tmp_path / "a", interventions=False)
    assert not [v for v in verdicts.values() if v.blocks], printed
    wrong = PREFERENCES.replace("float(loss(x))", "float(reference(x.flatten(0, 1)).std())")
    verdicts, printed, _ = guard(wrong, tmp_path / "b", interventions=False)
    assert "has not moved" in verdicts["evaluated"].measured, printed
