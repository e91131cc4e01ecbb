"""Forms of public scripts that guard could not check, or checked wrongly: schedules whose formula ends, learners with a `parameters()` of
their own, targets that were copied to another type, targets of several samples in one row."""

import torch
from trainworthy.guard.checks.interventions import overfit
from trainworthy.guard.measures.losses.pairing import Pairing

from tests.conftest import patched
from tests.guard.guarding import guard

POLYNOMIAL = """
import torch

class Polynomial(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, steps):
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self):
        return [max(base * (1 - self.last_epoch / self.steps) ** 0.9, 1e-6) for base in self.base_lrs]

torch.manual_seed(0)
x = torch.randn(96, 4)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()), 8, shuffle=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = Polynomial(optimizer, 120)
for epoch in range(10):
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        scheduler.step()
"""


def test_a_schedule_whose_formula_has_no_real_value_after_its_end(tmp_path):
    verdicts, printed, _ = guard(POLYNOMIAL, tmp_path, interventions=False)
    assert verdicts["schedule"].verdict == "pass", printed


FAST_WEIGHTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(16, 4) / 2), nn.Parameter(torch.zeros(16)),
                                      nn.Parameter(torch.randn(3, 16) / 4), nn.Parameter(torch.zeros(3))])

    def forward(self, x, weights=None):
        a, b, c, d = weights or self.vars
        return F.linear(torch.tanh(F.linear(x, a, b)), c, d)

    def parameters(self):
        return self.vars

torch.manual_seed(0)
net = Learner()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for task in range(200):
    centres = torch.randn(3, 4) * 2
    y = torch.arange(30) % 3
    x = centres[y] + torch.randn(30, 4)
    slopes = torch.autograd.grad(F.cross_entropy(net(x[:15]), y[:15]), list(net.parameters()))
    fast = [p - 0.4 * g for p, g in zip(net.parameters(), slopes)]
    loss = F.cross_entropy(net(x[15:], fast), y[15:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_learner_whose_parameters_are_a_list_of_its_own(tmp_path):
    verdicts, printed, _ = guard(FAST_WEIGHTS, tmp_path, interventions=False)
    assert "the observer failed" not in printed
    assert verdicts["wiring"].verdict == "pass", printed
    assert not [v for v in verdicts.values() if v.blocks], printed


MASKS = """
import torch
from torch import nn

torch.manual_seed(0)
images, masks = [], []
for i in range(96):
    mask = torch.zeros(8, 8, dtype=torch.uint8)
    a, b = (int(v) for v in torch.randint(0, 5, (2,)))
    mask[a : a + 3, b : b + 3] = 1 + i % 2
    masks.append(mask)
    images.append(torch.stack([(mask == 1) * 1.0, (mask == 2) * 1.0]) + 0.1 * torch.randn(2, 8, 8))
loader = torch.utils.data.DataLoader(list(zip(images, masks)), 16, shuffle=True)
model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(20):
    for x, y in loader:
        x, y = x.to(dtype=torch.float32), y.to(dtype=torch.long)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_masks_that_the_loop_copies_to_another_type_are_the_target(tmp_path):
    verdicts, printed, _ = guard(MASKS, tmp_path)
    assert verdicts["overfit"].verdict == "pass", printed


def test_targets_of_several_samples_in_one_row_have_no_order_of_samples():
    images, texts = torch.randn(4, 1, 8, 16), torch.tensor([3, 1, 2, 2, 5, 1, 4, 1, 1])
    one = Pairing()
    one.root((images,), {})
    one.loss("ctc_loss", texts, [[images, texts]], 0)
    assert not one.steps
    assert not one.detail


def test_a_loss_that_falls_on_is_too_early_to_say():
    slow = [5.53 - 5e-5 * i * i for i in range(116)]
    facts = {"nll": slow, "train_accuracy": [0.1] * 116}
    assert "still falls" in overfit(facts, {"nll": slow})["skip"]
    assert "skip" in overfit(facts, {"nll": slow[:81]})
    stuck = {"nll": [2.3 * 0.9**i + 2.0 for i in range(116)], "train_accuracy": [0.1] * 116}
    assert overfit(stuck, stuck)["cause"]
    half = {"nll": [2.5 - 0.011 * i for i in range(116)], "train_accuracy": [0.5] * 116}  # half of the labels are wrong
    assert overfit(half, half)["cause"]


ANEW = """
import torch
from torch import nn

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(nn.Linear(8, 8)(torch.tanh(self.first(x))) + x)

model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
y = (x[:, 0] > 0).long()
for step in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_a_layer_that_forward_creates(tmp_path):
    verdicts, printed, _ = guard(ANEW, tmp_path, interventions=False)
    assert "at every call of the model: Linear (8, 8)" in verdicts["wiring"].measured, printed
    mended = patched(ANEW, ("self.first, self.norm = ", "self.first, self.last = "), ("nn.LayerNorm(8)", "nn.Linear(8, 8)"),
                     ("self.norm(nn.Linear(8, 8)(", "nn.LayerNorm(8)(self.last("))  # fmt: skip
    verdicts, printed, _ = guard(mended, tmp_path, interventions=False)
    assert verdicts["wiring"].verdict == "pass", printed  # the weights of such a norm are the same at every call


ENDLESS = """
import random
import torch
from torch import nn

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rng = random.Random(1)
        while True:
            x = torch.tensor([rng.gauss(0, 1) for _ in range(4)])
            yield x, int(x[0] > 0)

def iter_batches():
    for x, y in torch.utils.data.DataLoader(Stream(), 16):
        yield x, y

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = iter_batches()
x, y = next(batches)
for step in range(100_000):
    for micro in range(2):
        loss = nn.functional.cross_entropy(model(x), y) / 2
        x, y = next(batches)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_generator_around_an_endless_loader(tmp_path):
    verdicts, printed, _ = guard(ENDLESS, tmp_path)
    assert verdicts["gradients"].verdict == "pass", printed
    assert not [v for v in verdicts.values() if v.blocks], printed


ROLLOUT = """
import gymnasium
import torch
from torch import nn

torch.manual_seed(0)
env = gymnasium.make("CartPole-v1")
actor, critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
state, _ = env.reset(seed=0)
for update in range(100):
    states, actions, logs, rewards, ends = [], [], [], [], []
    for t in range(200):
        x = torch.as_tensor(state)
        with torch.no_grad():
            play = torch.distributions.Categorical(logits=actor(x))
        action = play.sample()
        state, reward, ended, cut, _ = env.step(int(action))
        states.append(x), actions.append(action), logs.append(play.log_prob(action)), rewards.append(reward), ends.append(ended or cut)
        if ended or cut:
            state, _ = env.reset()
    total, returns = 0.0, []
    for reward, end in zip(reversed(rewards), reversed(ends)):
        total = reward + 0.99 * total * (not end)
        returns.insert(0, total)
    states, actions, logs, returns = torch.stack(states), torch.stack(actions), torch.stack(logs), torch.tensor(returns)
    returns = (returns - returns.mean()) / returns.std()
    for epoch in range(2000):
        play, value = torch.distributions.Categorical(logits=actor(states)), critic(states).squeeze(-1)
        ratio, gain = (play.log_prob(actions) - logs).exp(), returns - value.detach()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() + 0.5 * (value - returns).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_many_epochs_on_one_rollout_are_no_stale_batch(tmp_path):
    verdicts, printed, _ = guard(ROLLOUT, tmp_path, interventions=False)
    assert verdicts["passes"].verdict == "skip", printed
    assert not [v for v in verdicts.values() if v.blocks], printed


SENTENCES = """
import random
import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
good, bad, rest = ["fine", "great", "nice", "lovely"], ["poor", "awful", "bad", "dull"], ["the", "film", "was", "very", "seen", "we"]
rows = [(" ".join(random.sample(rest, 4) + [random.choice(good if i % 2 else bad)]), i % 2) for i in range(400)]
words = {w: i + 1 for i, w in enumerate(good + bad + rest)}
loader = torch.utils.data.DataLoader(rows, 32, shuffle=True)  # ("text", ...), labels

def tokenize(texts):
    return torch.tensor([[words[w] for w in t.split()] for t in texts])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(10):
    for texts, labels in loader:
        loss = nn.functional.cross_entropy(model(tokenize(texts)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_texts_that_the_loop_tokenizes_are_exchanged(tmp_path):
    verdicts, printed, _ = guard(SENTENCES, tmp_path)
    assert verdicts["overfit"].verdict == "pass", printed
    broken = patched(SENTENCES, ("model(tokenize(texts))", "model(tokenize(sorted(texts)))"))
    verdicts, printed, _ = guard(broken, tmp_path)
    assert verdicts["overfit"].blocks, printed


WITHIN = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(400, 8)
data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
train, val = torch.utils.data.random_split(data, [320, 80])
train, val = torch.utils.data.DataLoader(train, 16, shuffle=True), torch.utils.data.DataLoader(val, 16)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
done = 0
for epoch in range(20):
    model.train()
    for a, b in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
        done += 1
        if done % 6 == 0:
            model.eval()
            with torch.no_grad():
                right = sum(int((model(a).argmax(1) == b).sum()) for a, b in val)
            print(f"val acc {right / 80:.3f}")
            model.train()
"""


def test_an_evaluation_within_an_epoch_after_which_train_is_missing(tmp_path):
    verdicts, printed, _ = guard(WITHIN, tmp_path, interventions=False)
    assert verdicts["modes"].verdict == "pass", printed
    broken = patched(WITHIN, ('            print(f"val acc {right / 80:.3f}")\n            model.train()\n', ""))
    verdicts, printed, _ = guard(broken, tmp_path, interventions=False)
    assert "evaluations within an epoch" in verdicts["modes"].measured, printed
