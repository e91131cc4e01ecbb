"""Shapes of public trainers that were stopped, or not rehearsed, although they are healthy."""

from tests.guard.guarding import guard

TRANSLATE = """
import torch
from torch import nn
torch.manual_seed(0)
a = torch.rand(96, 3, 16, 16) * 2 - 1
train, val = (torch.utils.data.TensorDataset(x, -x) for x in (a[:80], a[80:]))
generator = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(16, 3, 3, padding=1), nn.Tanh())

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(6, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 3, padding=1))
    def forward(self, made, given):
        return self.net(torch.cat([made, given], 1))

critic = Critic()
g = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
d = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
mse, l1 = nn.MSELoss(), nn.L1Loss()
loader, shown = torch.utils.data.DataLoader(train, 4, shuffle=True), torch.utils.data.DataLoader(val, 8)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        made = generator(x)
        score = critic(made, x)
        g.zero_grad()
        (mse(score, torch.ones_like(score)) + 100 * l1(made, y)).backward()
        g.step()
        real, fake = critic(y, x), critic(made.detach(), x)
        d.zero_grad()
        (0.5 * (mse(real, torch.ones_like(real)) + mse(fake, torch.zeros_like(fake)))).backward()
        d.step()
        if i % 10 == 0:
            x, y = next(iter(shown))
            torch.save(generator(x), "pictures.pt")
"""


def test_dropout_is_the_noise_of_a_conditional_generator(tmp_path):
    """pix2pix samples its pictures with dropout. Another model's dropout is alive by mistake."""
    found, printed, _ = guard(TRANSLATE, tmp_path, interventions=False)
    assert not [v for v in found.values() if v.blocks], printed
    alone = TRANSLATE.replace("mse(score, torch.ones_like(score)) + ", "").replace("score = critic(made, x)", "")
    found, _, _ = guard(alone, tmp_path / "alone", interventions=False)
    assert "dropout is active" in found["modes"].measured, found["modes"]


PRENET = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.out = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x):
        return self.out(F.dropout(
            F.relu(self.net(x)), p=0.5, training=True))

x = torch.randn(400, 8)
y = x[:, :3].argmax(1)
train, val = (torch.utils.data.TensorDataset(x[s], y[s]) for s in (slice(320), slice(320, None)))
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(4):
    model.train()
    for a, b in torch.utils.data.DataLoader(train, 16, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(a), b).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(a).argmax(1) == b).sum()) for a, b in torch.utils.data.DataLoader(val, 16))
    print("accuracy", right / len(val))
"""


def test_dropout_that_is_written_to_stay_on(tmp_path):
    """Tacotron's prenet drops in every mode. Without the argument, the same dropout stays on by its default."""
    found, printed, _ = guard(PRENET, tmp_path, interventions=False)
    assert not [v for v in found.values() if v.blocks], printed
    found, printed, _ = guard(
        PRENET.replace("p=0.5, training=True", "p=0.5"), tmp_path / "default", interventions=False
    )
    assert "dropout is active" in found["modes"].measured, printed


EACH = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(160, 8)
y = x @ torch.randn(8, 1)
fixed, net = nn.Linear(8, 4), nn.Linear(12, 1)
optimizers = [torch.optim.Adam([p], 1e-2) for p in (*fixed.parameters(), *net.parameters())]
for epoch in range(4):
    for a, b in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True):
        with torch.no_grad():
            seen = fixed(a)
        loss = nn.functional.mse_loss(net(torch.cat([a, seen], 1)), b)
        loss.backward()
        for o in optimizers:
            o.step()
        for o in optimizers:
            o.zero_grad()
"""


def test_an_optimiser_for_every_parameter(tmp_path):
    """Pyro makes one for each, also for those of a fixed model. Without gradients anywhere the order is wrong."""
    found, _, _ = guard(EACH, tmp_path, interventions=False)
    assert found["gradients"].verdict == "pass", found["gradients"]
    early = EACH.replace("    for o in optimizers:\n            o.step()\n        ", "    ").replace(
        "o.zero_grad()\n", "o.zero_grad()\n        for o in optimizers:\n            o.step()\n"
    )
    found, _, _ = guard(early, tmp_path / "early", interventions=False)
    assert "there was no gradient" in found["gradients"].measured, found["gradients"]


KEPT = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(400, 8)
y = (x @ torch.randn(8, 3)).argmax(1)
train, val = (torch.utils.data.TensorDataset(x[s], y[s]) for s in (slice(0, 300), slice(280, 400)))
train, val = torch.utils.data.DataLoader(train, 8, shuffle=True), torch.utils.data.DataLoader(val, 8)
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
kept = iter(val)
with torch.no_grad():
    for _ in range(2):
        model(next(kept)[0])
for epoch in range(3):
    for a, b in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    with torch.no_grad():
        print("acc", sum((model(a).argmax(1) == b).float().sum() for a, b in val) / 120)
"""


def test_an_evaluation_whose_iterator_is_kept_is_no_training(tmp_path):
    """Lightning tries two batches of the validation before it trains, and keeps the iterator."""
    found, printed, _ = guard(KEPT, tmp_path, interventions=False)
    assert found["passes"].measured.startswith("38 batches drawn"), printed
    assert "of the validation samples are training samples" in found["samples"].measured, printed
