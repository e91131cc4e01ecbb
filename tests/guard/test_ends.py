"""What shows at a script's end: an average of weights that is still its beginning, sampling backwards in time, a last test that compares the
predictions with something else. Each bug is stopped, its healthy twin and what looks like it are not."""

import pytest
import torch
from torch import nn
from trainworthy.guard.measures.models.averages import Trail, buffers, fault
from trainworthy.guard.measures.models.sampling import Sampling
from trainworthy.guard.measures.rates import spent
from trainworthy.guard.measures.records import Sched

from tests.guard.guarding import guard

EMA = """
import copy, torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(SEED)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
order = torch.randperm(len(x))
x, y = x[order], y[order]
train = DataLoader(TensorDataset(x[:1200], y[:1200]), 32, shuffle=True)
val = DataLoader(TensorDataset(x[1200:], y[1200:]), 200)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY))
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for epoch in range(6):
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        ema.update_parameters(model)
    ema.eval()
    with torch.no_grad():
        right = sum((ema(a).argmax(1) == b).sum().item() for a, b in val)
    print(f"epoch {epoch} accuracy {right / len(val.dataset):.4f}")
"""

DDPM = """
import torch
from sklearn.datasets import load_digits
from torch import nn
torch.manual_seed(SEED)
data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
T = 100
betas = torch.linspace(1e-4, 0.1, T)
bar = torch.cumprod(1 - betas, 0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 128)
        self.a, self.b, self.c = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)
    def forward(self, x, t):
        h = torch.relu(self.a(x) + self.time(t))
        return self.c(torch.relu(self.b(h)))

net = Net()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 64, shuffle=True)
for epoch in range(3):
    for (x0,) in loader:
        t = torch.randint(T, (len(x0),))
        noise = torch.randn_like(x0)
        a = bar[t][:, None]
        loss = nn.functional.mse_loss(net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
with torch.no_grad():
    x = torch.randn(64, 64)
    for i in TIMES:
        t = torch.full((64,), i)
        noise = net(x, t)
        x = (x - betas[i] / (1 - bar[i]).sqrt() * noise) / (1 - betas[i]).sqrt()
        x = x + betas[i].sqrt() * torch.randn_like(x) if i else x
print("std of samples", x.std().item())
"""

UNITS = """
import numpy as np, torch
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)
x = rng.normal(size=(1200, 5))
table = np.concatenate([x * [3, 9, 1, 1, 4], 50 + 20 * (x @ rng.normal(size=(5, 1))) + 5 * rng.normal(size=(1200, 1))], 1)
train, test = table[:900], table[900:]
scaler = StandardScaler().fit(train)
a, b = (torch.tensor(scaler.transform(t), dtype=torch.float32) for t in (train, test))
train_loader = DataLoader(TensorDataset(a[:, :5], a[:, 5:]), 32, shuffle=True)
test_loader = DataLoader(TensorDataset(b[:, :5], b[:, 5:]), 64, shuffle=SHUFFLE)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
for epoch in range(10):
    model.train()
    for p, q in train_loader:
        loss = nn.functional.mse_loss(model(p), q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
model.eval()
with torch.no_grad():
    pred = torch.cat([model(p) for p, _ in test_loader]).numpy()
pred = pred * SCALE + MEAN
truth = test[:, 5:]
print(f"baseline rmse {np.sqrt(((truth - truth.mean()) ** 2).mean()):.3f}, mean of training {np.abs(truth - 50).mean():.3f} mae")
print(f"test rmse {np.sqrt(((pred - truth) ** 2).mean()):.3f}")
"""
SPLITS = """
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(SEED)
data = load_digits()
x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
order = torch.randperm(len(x))
names = sorted(map(str, range(10)), key=NAMES)
test_y = torch.tensor([names.index(str(int(i))) for i in y])
train, val = (DataLoader(TensorDataset(x[i], y[i]), 32, shuffle=True) for i in (order[:1000], order[1000:1400]))
test = DataLoader(TensorDataset(x[order[1400:]], test_y[order[1400:]]), 100)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)

def accuracy(loader):
    model.eval()
    with torch.no_grad():
        return sum((model(p).argmax(1) == q).sum().item() for p, q in loader) / len(loader.dataset)

for epoch in range(6):
    model.train()
    for p, q in train:
        loss = nn.functional.cross_entropy(model(p), q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} accuracy {accuracy(val):.4f}")
print(f"test accuracy {accuracy(test):.4f}")
"""
UNIT = {"SHUFFLE": "False", "SCALE": "scaler.scale_[5]", "MEAN": "scaler.mean_[5]"}


def ends(text: str, folder, seed: int = 0, **values: str) -> tuple[bool, str]:
    """Whether the check of the script's end stops a script, and what was printed."""
    for name, value in {"SEED": str(seed), **values}.items():
        text = text.replace(name, value)
    verdicts, output, _ = guard(text, folder, **{"--only": "ending", "--seconds": "6"})
    assert verdicts["ending"].verdict != "skip", output
    return verdicts["ending"].blocks, output


@pytest.mark.parametrize(("decay", "stopped"), [("0.9999", True), ("0.98", False)])
def test_an_average_of_weights_that_is_still_its_beginning(decay: str, stopped: bool, tmp_path):
    found, output = ends(EMA, tmp_path, DECAY=decay)
    assert found == stopped, output
    assert not stopped or "initial weights" in output


def test_a_script_that_imports_datasets_is_followed_to_its_end(tmp_path):
    """A hook on the library asked a rehearsal to the end for what it does not record, and every import of it raised there."""
    found, output = ends(EMA.replace("import copy, torch", "import copy, torch, datasets"), tmp_path, DECAY="0.98")
    assert not found, output


@pytest.mark.parametrize(("indent", "stopped"), [("    ", True), ("        ", False)])
def test_an_average_that_is_updated_once_an_epoch(indent: str, stopped: bool, tmp_path):
    """With the decay of a longer run the evaluation of the memorised samples shows nothing; once an epoch is another fault."""
    lines = EMA.splitlines()
    average = next(i for i, line in enumerate(lines) if line.startswith("ema ="))
    update = next(i for i, line in enumerate(lines) if "update_parameters" in line)
    lines[average] = "ema = copy.deepcopy(model).requires_grad_(False)"
    lines[update] = f"""{indent}with torch.no_grad():
{indent}    for p, q in zip(ema.parameters(), model.parameters()):
{indent}        p.mul_(0.999).add_(q, alpha=0.001)"""
    verdicts, output, _ = guard("\n".join(lines).replace("SEED", "0"), tmp_path, **{"--only": "metric"})
    assert verdicts["metric"].blocks == stopped, output
    assert not stopped or "once an epoch" in output


@pytest.mark.parametrize(("times", "stopped"), [("range(T)", True), ("reversed(range(T))", False)])
def test_sampling_backwards_in_time(times: str, stopped: bool, tmp_path):
    found, output = ends(DDPM, tmp_path, TIMES=times)
    assert found == stopped, output
    assert not stopped or "backwards" in output


@pytest.mark.parametrize("change", [{}, {"MEAN": "scaler.mean_[0]", "SCALE": "scaler.scale_[0]"}, {"SHUFFLE": "True"}])
def test_a_last_test_in_another_unit_or_order(change: dict, tmp_path):
    found, output = ends(UNITS, tmp_path, **(UNIT | change))
    assert found == bool(change), output
    assert not change or "right answers" in output


@pytest.mark.parametrize(
    ("names", "stopped"),
    [
        ("int", False),
        ('lambda n: ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][int(n)]', True),
    ],
)
def test_classes_of_the_test_alone_have_other_numbers(names: str, stopped: bool, tmp_path):
    found, output = ends(SPLITS, tmp_path, NAMES=names)
    assert found == stopped, output
    assert not stopped or "number their classes differently" in output


def walk(decay: float, *, steps: int = 200, kept: int = 0, seed: int = 0):
    """Train a layer with an average beside it; what is said of the average, or of a step's weights that were kept."""
    torch.manual_seed(seed)
    net, average = nn.Linear(16, 16), nn.Linear(16, 16)
    average.load_state_dict(net.state_dict())
    start = {id(p): (p, p.detach().flatten().clone()) for p in net.parameters()}
    goal, trail = torch.randn(16, 16), Trail()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    trail.trains(net)
    for step in range(steps):
        optimizer.zero_grad()
        ((net.weight - goal) ** 2).sum().backward()
        optimizer.step()
        trail.step(list(net.parameters()))
        with torch.no_grad():
            for p, q in zip(average.parameters(), net.parameters(), strict=True):
                if not kept:
                    p.lerp_(q, 1 - (min(decay, (1 + step) / (10 + step)) if decay > 0.9999 else decay))
                elif step == kept:
                    p.copy_(q)
    trail.evaluated(average, [net], start, steps)
    return fault(trail.found, steps, steps)


@pytest.mark.parametrize("copied", [False, True])
def test_an_average_without_the_buffers(copied: bool):
    torch.manual_seed(0)
    net, average = (nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2))
    average.load_state_dict(net.state_dict())
    start = {id(p): (p, p.detach().flatten()[:256].clone()) for p in net.parameters()}
    optimizer, trail = torch.optim.Adam(net.parameters(), 1e-2), Trail()
    trail.trains(net)
    for _ in range(60):
        optimizer.zero_grad()
        (net(torch.randn(32, 16) + 1) - 3).square().mean().backward()
        optimizer.step()
        trail.step(list(net.parameters()))
        with torch.no_grad():
            for p, q in zip(average.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.1)
            for p, q in zip(average.buffers(), net.buffers(), strict=True):
                p.copy_(q if copied else p)
    trail.evaluated(average.eval(), [net], start, 60)
    assert bool(buffers(trail)) != copied


@pytest.mark.parametrize("seed", range(5))
def test_averages_and_kept_weights(seed: int):
    assert walk(0.9995, seed=seed)
    assert not walk(0.9, seed=seed)
    assert not walk(0.99999, seed=seed)  # whose decay is warmed up
    assert not walk(0.0, kept=10, seed=seed)  # the best weights were those of an early step


class Timed(nn.Module):
    def forward(self, x, t):
        return x


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("first", "stopped"), [(0.0, True), (1.0, False), (0.5, False)])
def test_the_time_that_is_told_with_pure_noise(seed: int, first: float, stopped: bool):
    torch.manual_seed(seed)
    one, net = Sampling(), Timed()
    for _ in range(12):
        noise, x, t = torch.randn(64, 64), torch.randn(64, 64), torch.rand(64, 1)
        one.drew(noise)
        one.call(net, (t * noise + (1 - t) * x, t), {})
    with torch.no_grad():
        noise = torch.randn(8, 64)
        one.drew(noise)
        one.call(net, (noise, torch.full((8, 1), first)), {})
        one.call(net, (0.9 * noise, torch.zeros(8, 1)), {})
    assert (one.fault({}) is not None) == stopped


def planned(make, steps: int = 40) -> bool:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return spent(Sched(scheduler, optimizer), rates) is not None


def test_a_rate_that_is_gone_before_the_middle_of_the_run():
    schedulers = torch.optim.lr_scheduler
    assert planned(lambda o: schedulers.StepLR(o, 3, 0.3))
    assert planned(lambda o: schedulers.MultiStepLR(o, [3, 6, 9], 0.1))
    assert planned(lambda o: schedulers.ExponentialLR(o, 0.6))
    assert not planned(lambda o: schedulers.StepLR(o, 10, 0.3))
    assert not planned(lambda o: schedulers.MultiStepLR(o, [20, 30], 0.1))
    assert not planned(lambda o: schedulers.ExponentialLR(o, 0.9))
    assert not planned(lambda o: schedulers.CosineAnnealingLR(o, 40))
    assert not planned(lambda o: schedulers.CosineAnnealingWarmRestarts(o, 10))
    assert not planned(lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=45))
    assert not planned(lambda o: schedulers.LinearLR(o, 1.0, 0.0, 40))
