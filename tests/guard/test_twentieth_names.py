"""What `names` reads in a script's source, of the kinds that the twentieth set showed: rows by a slice of shuffled indices, parts read as if they
alternated, a temperature that multiplies, a metric that is never reset, a next item that is the present one, ends of other steps, views of pixels."""

import pytest
from trainworthy.guard.checks import names

from tests.conftest import patched

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
