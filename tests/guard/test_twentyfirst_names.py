"""What `names` reads in a script's source, of the kinds that the twenty-first set showed: values that are dropped, parameters bound anew, an
observation that is overwritten, the action of another state, the sign of an entropy's weight, a plateau in the other direction, a map to -1..1
that nothing calls, a sampling loop that runs forwards, splits
that overlap."""

import pytest
from trainworthy.guard.checks import names

from tests.conftest import patched

AVERAGES = """
import pandas as pd


class Average:
    def __init__(self, beta):
        self.beta = beta

    def update(self, kept, model):
        for slow, fast in zip(kept.parameters(), model.parameters()):
            slow.data = self.mean(slow.data, fast.data)

    def mean(self, old, new):
        return old * self.beta + (1 - self.beta) * new


def main(table, model, kept, batch):
    table = table.dropna()
    Average(0.9).update(kept, model)
    for x in batch:
        x = x.to("cpu")
        model(x)
    return table


main(*[None] * 4)
"""
SLOW = "slow.data = self.mean(slow.data, fast.data)"
DROPPED = {
    "healthy": ([], False),
    "not assigned": ([(SLOW, "self.mean(slow.data, fast.data)")], True),
    "bound anew": ([(SLOW, "slow = self.mean(slow.data, fast.data)")], True),
    "bound and read": ([(SLOW, "slow = slow.data\n            slow.copy_(self.mean(slow, fast.data))")], False),
    "in place": ([(SLOW, "slow.data.mul_(self.beta).add_(fast.data, alpha=1 - self.beta)")], False),
    "not in place": ([(SLOW, "slow.data.mul(self.beta)")], True),
    "changes something": (
        [
            (SLOW, "self.mean(slow.data, fast.data)"),
            ("        return old *", "        self.last = old\n        return old *"),
        ],
        False,
    ),
    "a method of its own": (
        [
            (SLOW, "self.clamp(0, 1)"),
            (
                "    def mean(",
                "    def clamp(self, low, high):\n        self.beta = min(self.beta, high)\n\n    def mean(",
            ),
        ],
        False,
    ),
    "a table's copy": ([("    table = table.dropna()\n", "    table.dropna()\n")], True),
    "a table in place": ([("    table = table.dropna()\n", "    table.dropna(inplace=True)\n")], False),
    "tried": (
        [("    table = table.dropna()\n", "    try:\n        table.dropna()\n    except ValueError:\n        pass\n")],
        False,
    ),
    "moved and dropped": (
        [('        x = x.to("cpu")\n        model(x)\n', '        x = x.to("cpu")\n    model(batch)\n')],
        True,
    ),
    "moved and read later": (
        [('        x = x.to("cpu")\n        model(x)\n', '        x = x.to("cpu")\n    model(x)\n')],
        False,
    ),
}
AGENT = """
def main(env, actor, critic, buffer, log_alpha, target_entropy, optimizer):
    obs, _ = env.reset()
    for _ in range(100):
        action = actor(obs)
        next_obs, reward, done, _, _ = env.step(action)
        buffer.add(obs, next_obs, action, reward, done)
        obs = next_obs
        batch = buffer.sample()
        next_action, next_log_prob = actor(batch.next_obs)
        target = batch.reward + critic(batch.next_obs, next_action)
        log_pi = actor(batch.obs)[1]
        alpha_loss = -(log_alpha.exp() * (log_pi + target_entropy).detach()).mean()
        (alpha_loss + target).backward()
        optimizer.step()


main(*[None] * 7)
"""
ADD, NOW = "        buffer.add(obs, next_obs, action, reward, done)\n", "        obs = next_obs\n"
DRAW, ALPHA = "actor(batch.next_obs)", "-(log_alpha.exp() * (log_pi + target_entropy).detach()).mean()"
LEARNING = {
    "healthy": ([], False),
    "overwritten": ([(ADD + NOW, NOW + ADD)], True),
    "in one tuple": ([(ADD + NOW, NOW + "        buffer.append((obs, action, reward, next_obs, done))\n")], True),
    "a copy": ([(ADD + NOW, "        old = obs\n" + NOW + "        buffer.add(old, next_obs, action, reward, done)\n")], False),
    "this state": ([(DRAW, "actor(batch.obs)")], True),
    "by another name": (
        [(DRAW, "actor(batch.obs)"), ("next_action, next", "chosen, next"), ("obs, next_action)", "obs, chosen)")],
        False,
    ),
    "turned sign": ([(ALPHA, "(log_alpha.exp() * (log_pi + target_entropy).detach()).mean()")], True),
    "minus inside": ([(ALPHA, "(-log_alpha.exp() * (log_pi + target_entropy)).mean()")], False),
    "minus of both": ([(ALPHA, "(log_alpha * (-log_pi - target_entropy).detach()).mean()")], False),
    "of the entropy": ([(ALPHA, "(log_alpha * (-log_pi.mean() - target_entropy)).mean()")], False),
    "turned within": ([(ALPHA, "(log_alpha * (target_entropy - log_pi)).mean()")], True),
    "torch's mean": ([(ALPHA, "-torch.mean(log_alpha * (log_pi + target_entropy).detach())")], False),
}  # fmt: skip
EPOCHS = """
def main(model, optimizer, loader, best):
    scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=2)
    for epoch in range(9):
        score = evaluate(model, loader)
        scheduler.step(score)
        if score > best:
            best = score
            torch.save(model.state_dict(), "best.pt")


main(*[None] * 4)
"""
PLATEAUS = {
    "healthy": ([], False),
    "the other mode": ([('mode="max"', 'mode="min"')], True),
    "by default": ([('mode="max", ', "")], True),
    "a loss": ([('mode="max", ', ""), ("score > best", "score < best")], False),
    "a loss that rises": ([("score > best", "score < best")], True),
    "of another value": ([('mode="max"', 'mode="min"'), ("scheduler.step(score)", "scheduler.step(-score)")], False),
    "a setting": ([('mode="max"', "mode=loader.mode")], False),
}
SAMPLES = """
def spread(x):
    return x * 2 - 1


def back(x):
    return (x + 1) * 0.5


def main(model, images, noise):
    images = spread(images)
    model(images + noise).mean().backward()
    return back(model(noise))


main(*[None] * 3)
"""
MAPS = {
    "healthy": ([], False),
    "never called": ([("    images = spread(images)\n", "")], True),
    "written out": ([("images = spread(images)", "images = 2 * images - 1")], False),
    "by a transform": ([("images = spread(images)", "images = Normalize(0.5, 0.5)(images)")], False),
    "neither": ([("    images = spread(images)\n", ""), ("back(model(noise))", "model(noise)")], False),
}
CHAIN = """
class Diffusion:
    def __init__(self, net, T):
        self.net, self.T, self.alphas_cumprod = net, T, make(T)

    def p_sample(self, x, t):
        times = torch.full((len(x),), t)
        return x - self.net(x, times)

    def sample(self, n):
        img = torch.randn(n, 1, 8, 8)
        for t in reversed(range(self.T)):
            img = self.p_sample(img, t)
        return img


def main(net, images):
    images.backward()
    return Diffusion(net, 100).sample(4)


main(None, None)
"""
ORDER, STEP = "for t in reversed(range(self.T)):", "            img = self.p_sample(img, t)\n"
SAMPLING = {
    "healthy": ([], False),
    "forwards": ([(ORDER, "for t in range(self.T):")], True),
    "with a bar": ([(ORDER, "for t in tqdm(range(self.T), desc='sampling'):")], True),
    "counted down": ([(ORDER, "for t in range(self.T - 1, -1, -1):")], False),
    "turned within": ([(ORDER, "for i in range(self.T):"), (STEP, "            t = self.T - 1 - i\n" + STEP)], False),
    "of a list of times": (
        [(ORDER, "for i in range(self.T):"), (STEP, "            t = self.times[i]\n" + STEP)],
        False,
    ),
    "filled": (
        [
            (ORDER, "for t in range(self.T):"),
            (STEP, "            ts = torch.full((n,), t)\n            img = self.net(img, ts)\n"),
        ],
        True,
    ),
    "a flow": ([(ORDER, "for t in range(self.T):"), ("self.alphas_cumprod", "self.weights")], False),
    "noising": ([(ORDER, "for t in range(self.T):"), (STEP, "            img = self.q_sample(img, t)\n")], False),
}
SLICES = """
def main(model, data, optimizer):
    n = len(data)
    cut = int(n * 0.9)
    train_data = data[:cut]
    val_data = data[cut:]
    for x in train_data:
        model(x).backward()
        optimizer.step()
    return model(val_data)


main(*[None] * 3)
"""
TRAIN, VAL = "train_data = data[:cut]", "val_data = data[cut:]"
SPLITS = {
    "healthy": ([], False),
    "both from the start": ([(VAL, "val_data = data[: int(n * 0.1)]")], True),
    "both to the end": ([(TRAIN, "train_data = data[cut:]"), (VAL, "val_data = data[n // 2 :]")], True),
    "a smaller share": ([(VAL, "val_data = data[int(0.8 * n) :]")], True),
    "of its length": (
        [(TRAIN, "train_data = data[: int(len(data) * 0.9)]"), (VAL, "val_data = data[int(len(data) * 0.7) :]")],
        True,
    ),
    "a larger share": ([(VAL, "val_data = data[int(0.95 * n) :]")], False),
    "numbers": ([(TRAIN, "train_data = data[:1000]"), (VAL, "val_data = data[900:]")], True),
    "numbers in order": ([(TRAIN, "train_data = data[:1000]"), (VAL, "val_data = data[1000:]")], False),
    "the last ones": ([(TRAIN, "train_data = data[:-100]"), (VAL, "val_data = data[-100:]")], False),
    "shuffled between": ([(VAL, "data = other(data)\n    val_data = data[:100]")], False),
    "another array": ([(VAL, "val_data = model.data[:100]")], False),
    "another kind": ([(VAL, "val_losses = data[:100]"), ("model(val_data)", "model(val_losses)")], False),
}
RULES = {
    "slices": (SLICES, SPLITS),
    "sampling": (CHAIN, SAMPLING),
    "dropped": (AVERAGES, DROPPED),
    "learning": (AGENT, LEARNING),
    "plateau": (EPOCHS, PLATEAUS),
    "maps": (SAMPLES, MAPS),
}


@pytest.mark.parametrize(("rule", "variant"), [(r, v) for r, (_, variants) in RULES.items() for v in variants])
def test_names_reads_the_source(rule, variant, tmp_path):
    source, variants = RULES[rule]
    hunks, wrong = variants[variant]
    (tmp_path / "train.py").write_text(patched(source, *hunks))
    found = names.check(tmp_path / "train.py")
    assert found["ok"] is not wrong, found
