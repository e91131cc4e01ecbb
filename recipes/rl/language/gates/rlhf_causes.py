"""Names the known mistake behind returns and advantages that differ from their definition."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

Change = Callable[[Tensor, Tensor], Tensor]
"""(advantages of one answer (n,), those of all tokens) -> what the loss gets (n,)."""

WHITENED: dict[str, Change] = {
    "advantages are whitened within each answer: its own mean is subtracted, so no answer is better than another":
        lambda own, _: (own - own.mean()) / (own.std(correction=0) + 1e-8),
    "advantages are centred within each answer: its own mean is subtracted, so no answer is better than another":
        lambda own, _: own - own.mean(),
    "advantages are not whitened": lambda own, _: own,
    "advantages are centred, and not divided by their deviation": lambda own, every: own - every.mean(),
    "advantages are divided by their deviation, and not centred": lambda own, every: own / (every.std() + 1e-8),
    "advantages have the wrong sign": lambda own, every: -(own - every.mean()) / (every.std() + 1e-8),
}  # fmt: skip


class Answer(NamedTuple):
    """What the return of an answer is made of."""

    kl: list[float]
    """Of each token, in nats."""
    reward: float
    values: list[float]
    got: list[float]
    """The recipe's return at each token."""


def estimates(reward: list[float], value: list[float], gamma: float, lam: float) -> list[float]:
    """Return advantages by their definition: discounted sums of one-step errors (Schulman 2016, equation 16)."""
    after = [*value[1:], 0.0]
    errors = [r + gamma * w - v for r, v, w in zip(reward, value, after, strict=True)]
    return [sum((gamma * lam) ** (u - t) * errors[u] for u in range(t, len(errors))) for t in range(len(errors))]


def paid(answer: Answer, coef: float) -> dict[str, list[float]]:
    """Return what each token of an answer earns by a known mistake."""
    penalty, reward, n = [-coef * k for k in answer.kl], answer.reward, len(answer.kl)
    at = lambda place: [reward * (i == place) for i in range(n)]  # noqa: E731
    add = lambda a, b: [x + y for x, y in zip(a, b, strict=True)]  # noqa: E731
    return {
        "the KL penalty has the wrong sign: it must be subtracted from the reward": add([-p for p in penalty], at(n - 1)),
        "no KL penalty is paid: the reference is the policy itself, or the coefficient is 0": at(n - 1),
        "the reward is added at the token before the last": add(penalty, at(max(0, n - 2))),
        "the reward is added at an answer's first token": add(penalty, at(0)),
        "the reward is added at every token": [p + reward for p in penalty],
        "the reward is missing: only the KL penalty is paid": penalty,
    }  # fmt: skip


def of_returns(answers: Sequence[Answer], coef: float, gamma: float, lam: float, most: float) -> str:
    """Return the known mistake that gives the returns of all answers within `most`; "" if none does."""
    left = {*paid(answers[0], coef)} if answers else set()
    for answer in answers:
        for name, earned in paid(answer, coef).items():
            due = [a + v for a, v in zip(estimates(earned, answer.values, gamma, lam), answer.values, strict=True)]
            if name in left and max(abs(d - g) for d, g in zip(due, answer.got, strict=True)) > most:
                left.discard(name)
    return next(iter(left)) if len(left) == 1 else ""


def of_advantages(rows: Sequence[Tensor], got: Sequence[Tensor], every: Tensor, limit: float) -> str:
    """Return the known mistake that gives the advantages `got` from the estimates `rows`, answer by answer; "" if none does. Answers of
    one token say nothing about a mean of their own."""
    long = [(own, seen) for own, seen in zip(rows, got, strict=True) if len(own) > 1]
    for name, change in WHITENED.items():
        due = [(change(own, every), seen) for own, seen in long]
        size = max((d.abs().max().item() for d, _ in due), default=0.0)
        if due and all((d - seen).abs().max() <= limit * max(1.0, size) for d, seen in due):
            return name
    return ""
