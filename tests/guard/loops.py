"""Loops of public shapes for `trainworthy.check`, each with bugs that its keyword arguments plant."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy  # by its name, as many scripts import it
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

PIXELS, DIGITS = (torch.tensor(v) for v in load_digits(return_X_y=True))
ORDER = torch.randperm(len(PIXELS), generator=torch.Generator().manual_seed(1))
PIXELS, DIGITS = PIXELS[ORDER].float() / 16, DIGITS[ORDER]
LEARN, HELD_OUT = (TensorDataset(PIXELS[rows], DIGITS[rows]) for rows in (slice(0, 1400), slice(1400, None)))
ROWS, GOALS = (torch.tensor(v, dtype=torch.float32) for v in load_diabetes(return_X_y=True))
ROWS, GOALS = ROWS / ROWS.std(), GOALS / GOALS.std()  # goals of mean 2


def loader(data: TensorDataset = LEARN, size: int = 64) -> DataLoader:
    return DataLoader(data, size, shuffle=data is LEARN)


def classifier(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))


def accuracy(model: nn.Module, batches) -> float:
    model.eval()
    with torch.no_grad():
        pairs = [(int((model(x).argmax(1) == y).sum()), len(y)) for x, y in batches]
    return sum(right for right, _ in pairs) / sum(n for _, n in pairs)


# ------------------------------------------------------------------------------------------------------------------ VAE
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(64, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        """The negative evidence bound, with one draw."""
        h = F.relu(self.encoder(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        seen = F.binary_cross_entropy_with_logits(self.decoder(z), x, reduction="sum") / len(x)
        return seen - 0.5 * (1 + spread - mean**2 - spread.exp()).sum() / len(x)


def vae(*, bug: str = "", **more) -> trainworthy.Loop:
    model = Vae()
    parts = [model.encoder, model.mean, model.spread] if bug == "decoder-left-out" else [model]
    optimizer = torch.optim.Adam([p for part in parts for p in part.parameters()], lr=1e-3)

    def run(batches) -> None:
        model.train()
        for x, _ in batches:
            if bug != "zero-grad":
                optimizer.zero_grad()
            model(x).backward()
            optimizer.step()

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            return sum(float(model(x)) for x, _ in loader(HELD_OUT)) / 7

    return trainworthy.Loop(models=model, optimizers=optimizer, batches=loader(), run=run, evaluate=evaluate, **more)


# ------------------------------------------------------------------------------------------------------------------ GAN
def gan(*, bug: str = "", **more) -> trainworthy.Loop:
    maker = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    models = {"G": maker, "D": critic}
    optimizers = {k: torch.optim.Adam(m.parameters(), 2e-4, betas=(0.5, 0.999)) for k, m in models.items()}

    def judge(x: Tensor, real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(critic(x)[:, 0], torch.full((len(x),), real))

    def run(batches) -> None:
        for x, _ in batches:
            made = maker(torch.randn(len(x), 16))
            if bug != "zero-grad-of-the-critic":
                optimizers["D"].zero_grad()
            (judge(x, 1.0) + judge(made.detach(), 0.0)).backward()
            optimizers["D"].step()
            optimizers["G"].zero_grad()
            judge(made.detach() if bug == "generator-detached" else made, 1.0).backward()
            optimizers["G"].step()

    return trainworthy.Loop(models=models, optimizers=optimizers, batches=loader(), run=run, **more)


# ------------------------------------------------------------------------------------------------------------------ DQN
def dqn(*, bug: str = "", **more) -> trainworthy.Loop:
    """A walk on a line of nine places, the goal at its right end; a replay memory is what the batches come from."""
    net, target = (nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(2))
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam((target if bug == "optimizer-of-the-target" else net).parameters(), lr=1e-3)
    place = torch.eye(9)

    def replay() -> Iterator[tuple[Tensor, ...]]:
        memory, at = [], 4
        for step in itertools.count():
            greedy = step > 100 and torch.rand(()) > 0.3
            with torch.no_grad():
                action = int(net(place[at][None]).argmax()) if greedy else int(torch.randint(2, ()))
            then = max(0, at + (1 if action else -1))
            memory.append((place[at], torch.tensor(action), torch.tensor(float(then == 8)), place[then]))
            at = 4 if then == 8 else then
            if step >= 100 and step % 4 == 0:
                rows = torch.randint(len(memory), (32,))
                yield tuple(torch.stack(x) for x in zip(*(memory[i] for i in rows), strict=True))

    def run(batches) -> None:
        for step, (before, action, reward, after) in enumerate(batches):
            with torch.no_grad():
                goal = reward + 0.9 * target(after).max(1).values * (reward == 0)
            value = net(before).gather(1, action[:, None])
            error = goal - (value if bug == "broadcast" else value[:, 0])
            optimizer.zero_grad()
            error.square().mean().backward()
            optimizer.step()
            if step % 25 == 0:
                target.load_state_dict(net.state_dict())

    return trainworthy.Loop(models=net, optimizers=optimizer, batches=replay, run=run, **more)


# -------------------------------------------------------------------------------------------------------------- by hand
def by_hand(*, bug: str = "", **more) -> trainworthy.Loop:
    """SGD written out, no optimiser object."""
    model = classifier()

    def run(batches) -> None:
        model.train()
        for x, y in batches:
            y = y[torch.randperm(len(y))] if bug == "labels-shuffled" else y
            cross_entropy(model(x).softmax(1) if bug == "softmax" else model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    if bug == "rebound":
                        p = p - 0.2 * p.grad
                    else:
                        p -= 0.2 * p.grad
            if bug != "zero-grad":
                model.zero_grad()

    return trainworthy.Loop(
        models=model, batches=loader(), run=run, evaluate=lambda: accuracy(model, loader(HELD_OUT)), **more
    )


# ---------------------------------------------------------------------------------------------------------------- LBFGS
def lbfgs(*, bug: str = "", **more) -> trainworthy.Loop:
    """All data in every step, within a closure; nothing iterates."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    other = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS((other if bug == "optimizer-of-a-copy" else model).parameters(), lr=0.5, max_iter=6)

    def closure() -> Tensor:
        if bug != "zero-grad":
            optimizer.zero_grad()
        loss = F.mse_loss(model(ROWS[:300])[:, 0], GOALS[:300])
        loss.backward()
        return loss

    def evaluate() -> float:
        with torch.no_grad():
            return float(F.mse_loss(model(ROWS[300:])[:, 0], GOALS[300:]))

    return trainworthy.Loop(
        models=model, optimizers=optimizer, run=lambda: optimizer.step(closure), evaluate=evaluate, **more
    )


# ------------------------------------------------------------------------------------------------------------ masked LM
TEXT = torch.tensor(list(Path(__file__).read_bytes())) % 128
TEXT = TEXT[: len(TEXT) // 32 * 32].view(-1, 32)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(129, 32), nn.Embedding(32, 32), nn.Linear(32, 128)
        self.body = nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids) + self.place.weight))


def masked_lm(*, bug: str = "", **more) -> trainworthy.Loop:
    """Targets are made in the loop from the input itself, anew in every step."""
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(rows: Tensor) -> Tensor:
        hidden = torch.rand(rows.shape) < 0.15
        targets = rows.masked_fill(hidden if bug == "mask-inverted" else ~hidden, -100)
        return F.cross_entropy(model(rows.masked_fill(hidden, 128)).transpose(1, 2), targets)

    def run(batches) -> None:
        model.train()
        for rows in batches:
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()

    def evaluate(batches) -> float:
        if bug != "train-mode":
            model.eval()
        with torch.no_grad():
            return sum(float(loss(rows)) for rows in batches)

    rows = [TEXT[torch.randint(len(TEXT), (16,))] for _ in range(60)]  # a plain list of batches
    return trainworthy.Loop(models=model, optimizers=optimizer, batches=rows, run=run, evaluate=evaluate,
                            eval_batches=list(TEXT[:64].split(16)), **more)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ generators
def generator(*, bug: str = "", **more) -> trainworthy.Loop:
    """An endless generator of batches, with an accumulation window of two."""
    model = classifier(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            rows = torch.randint(1400, (32,))
            yield PIXELS[rows], DIGITS[rows]

    def run(batches) -> None:
        model.train()
        for i, (x, y) in enumerate(batches):
            y = y[torch.randperm(len(y))] if bug == "labels-shuffled" else y
            (F.cross_entropy(model(x), y) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    return trainworthy.Loop(models=model, optimizers=optimizer, batches=draw(), run=run,
                            evaluate=lambda: accuracy(model, loader(HELD_OUT)), **more)  # fmt: skip


def regression(*, bug: str = "", **more) -> trainworthy.Loop:
    """A loss without class numbers: `target` names what is predicted."""
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = [{"x": x, "goal": y} for x, y in zip(ROWS[:320].split(32), GOALS[:320].split(32), strict=True)]

    def run(batches) -> None:
        for batch in batches:
            goal = batch["goal"]
            goal = goal[torch.randperm(len(goal))] if bug == "goals-shuffled" else goal
            optimizer.zero_grad()
            F.huber_loss(model(batch["x"])[:, 0], goal).backward()
            optimizer.step()

    def evaluate(batches) -> float:
        with torch.no_grad():
            off = [F.mse_loss(model(b["x"])[:, 0] * (0.1 if bug == "scaled" else 1), b["goal"]).item() for b in batches]
        return sum(off) / len(off)

    held_out = [{"x": ROWS[320:352], "goal": GOALS[320:352]}]
    return trainworthy.Loop(models=model, optimizers=optimizer, batches=data, run=run, evaluate=evaluate, eval_batches=held_out,
                            **{"target": "goal", "higher_is_better": False, **more})  # fmt: skip


LOOPS: dict[str, Callable[..., trainworthy.Loop]] = {
    f.__name__: f for f in (vae, gan, dqn, by_hand, lbfgs, masked_lm, generator, regression)
}
BUGS = {
    ("vae", "decoder-left-out"): ("wiring", "in no optimiser: decoder"),
    ("vae", "zero-grad"): ("gradients", "zero_grad() is missing"),
    ("gan", "zero-grad-of-the-critic"): ("gradients", "zero_grad() is missing"),
    ("gan", "generator-detached"): ("gradients", "there was no gradient"),
    ("dqn", "optimizer-of-the-target"): ("wiring", "a copy of the model's parameters"),
    ("dqn", "broadcast"): ("targets", "a squeeze() or unsqueeze() is missing"),
    ("by_hand", "softmax"): ("loss-input", "softmax before a loss"),
    ("by_hand", "rebound"): ("wiring", "p = p - lr * p.grad"),
    ("by_hand", "zero-grad"): ("gradients", "model.zero_grad()"),
    ("by_hand", "labels-shuffled"): ("overfit", "labels do not belong to their inputs"),
    ("lbfgs", "zero-grad"): ("gradients", "in the closure"),
    ("lbfgs", "optimizer-of-a-copy"): ("wiring", "a copy of the model's parameters"),
    ("masked_lm", "mask-inverted"): ("targets", "the mask is inverted"),
    ("masked_lm", "train-mode"): ("modes", "model.eval() is missing"),
    ("generator", "labels-shuffled"): ("overfit", "labels do not belong to their inputs"),
    ("regression", "goals-shuffled"): ("overfit", "labels do not belong to their inputs"),
}
"""(loop, bug) -> the check that stops it, and words of what it says."""
