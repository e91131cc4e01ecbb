"""Checks which actions a policy's loss rewards, against the rewards that the environment gave.

Steps of gymnasium environments are recorded. The gradient of a loss with respect to a log-probability is the weight of that
action: an advantage with its sign reversed. Observations tell which step of which environment it belongs to.
"""

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor
from trainworthy.core.base.correlation import pearson
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.hooks.trees import floats, tensors
from trainworthy.guard.measures.losses.regression import unexplained_share
from trainworthy.guard.measures.records import on_gradient

STEPS, ROWS = 4096, 4096
DECAY = 0.97  # of a reward per step
UNMOVED = 100  # calls, steps and observations from which on a policy must have seen something new
EARLIER = 0.8  # correlation with the rewards so far; 0.97 and another decay differ by about 0.02
FIRST = 2048  # weights that are compared: the later ones lack what a critic has learnt


class Credit:
    """Steps of environments, and the weights of their actions in the loss."""

    def __init__(self) -> None:
        self.ready = False
        self.depth = 0
        self.rewards: dict[int, list[np.ndarray]] = {}
        self.ends: dict[int, list[np.ndarray]] = {}
        self.terminated: dict[int, list[np.ndarray]] = {}  # the same without time limits
        self.where: dict[bytes, tuple[int, int, int]] = {}  # observation -> environment, step, row
        self.again = 0
        self.batches: list[tuple[int, list[tuple[tuple[int, int, int], float]]]] = []
        """Number of recorded steps when the gradient came, and the weight of each step."""
        self.asked: tuple = ()
        """What the last model that was called with gradients got. A critic may be called without them between a policy and its `log_prob`."""
        self.known: set = set()
        self.played: dict[tuple[int, int, int], float] = {}  # the discrete action of each step
        self.scored: dict[tuple[int, int, int], float] = {}  # the action whose log-probability was taken there
        self.weights: dict[tuple[int, int], Tensor] = {}
        """By the number of recorded steps and the address of the observations: the weights of a batch's actions."""
        self.values: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Likewise: a critic's values, and their gradient."""
        self.guesses: dict[tuple[int, int, int], float] = {}  # a critic's value of each step that was looked at alone
        self.inputs: set[bytes] = set()  # rows that models with gradients got
        self.calls: list[int] = []  # recorded steps at each such call

    def install(self, replace: Any) -> None:
        """Record the steps of every environment class that exists, once gymnasium is imported."""
        if self.ready or "gymnasium" not in sys.modules:
            return
        import gymnasium

        self.ready = True
        todo, done = [gymnasium.Env, gymnasium.vector.VectorEnv], set()
        while todo:
            cls = todo.pop()
            if cls in done:
                continue
            done.add(cls)
            todo += cls.__subclasses__()
            for name in ("step", "reset"):
                if name in vars(cls):
                    replace(cls, name, self._wrapped)

    def _wrapped(self, original: Any) -> Any:
        def run(env: Any, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                out = original(env, *args, **kwargs)
            finally:
                self.depth -= 1
            if not self.depth and isinstance(out, tuple):
                with contextlib.suppress(Exception):
                    self.play(id(env), args)
                    self.seen(id(env), out)
            return out

        return run

    def play(self, env: int, args: tuple) -> None:
        """Note the discrete actions of a step of the outermost environment."""
        action = np.atleast_1d(np.asarray(args[0])) if args else np.zeros(0)
        if action.dtype.kind in "iu" and action.ndim == 1 and len(self.where) < STEPS:
            self.played |= {(env, len(self.rewards.get(env, [])), i): float(a) for i, a in enumerate(action)}

    def seen(self, env: int, out: tuple) -> None:
        """Note what a step or a reset of the outermost environment returned."""
        if len(self.where) >= STEPS or not isinstance(out[0], np.ndarray) or out[0].dtype.kind != "f":
            return
        rewards, ends = self.rewards.setdefault(env, []), self.ends.setdefault(env, [])
        obs = out[0]
        if len(out) >= 5:
            rewards.append(np.atleast_1d(np.asarray(out[1], dtype=float)))
            ends.append(np.atleast_1d(np.logical_or(out[2], out[3])))
            self.terminated.setdefault(env, []).append(np.atleast_1d(np.asarray(out[2], dtype=bool)))
            rows = obs if np.ndim(out[1]) else obs[None]
        else:
            if rewards and len(ends[-1]) == 1:
                ends[-1] = np.ones_like(ends[-1])
            rows = obs[None] if obs.ndim == 1 else obs
        for i, row in enumerate(rows):
            key = np.ascontiguousarray(row, dtype=np.float32).tobytes()
            self.again += key in self.where
            self.where[key] = (env, len(rewards), i)

    def places(self, rows: Iterable[np.ndarray]) -> list[tuple[int, int, int] | None]:
        """Return of which environment, step and row each observation is (float32); None: no environment gave it."""
        return [self.where.get(np.ascontiguousarray(row).tobytes()) for row in rows]

    def log_prob(self, out: Tensor, value: Any = None) -> None:
        """Note a log-probability that will be differentiated, of actions `value` in observations that are known."""
        if not self.where or not out.requires_grad or len(self.known) >= ROWS:
            return
        x = next(iter(floats(self.asked)), None)
        if x is None or not x.dim():
            return
        single = not out.dim()
        rows = x.detach().float().cpu().numpy()
        several = not single and rows.ndim > 1 and len(rows) == len(out)
        rows = rows if several else rows[0][None] if rows.ndim > 1 and len(rows) == 1 else rows[None]
        places = self.places(rows)
        if len(places) != (1 if single else len(out)) or sum(p is not None for p in places) < 0.8 * len(places):
            return

        actions = value.flatten().tolist() if isinstance(value, Tensor) and not value.is_floating_point() else []
        if len(actions) == len(places):
            self.scored |= {p: float(a) for p, a in zip(places, actions, strict=True) if p and p not in self.scored}
        home = address_of(x)

        def weighed(grad: Tensor) -> None:
            weights = -grad.detach().reshape(len(places), -1).mean(1)
            found = [(p, float(w)) for p, w in zip(places, weights, strict=True) if p and p not in self.known]
            self.known |= {p for p, _ in found}
            self.batches.append((self.count, found))
            self.weights.setdefault((self.count, home), to_double(weights))

        on_gradient(out, weighed)

    @property
    def count(self) -> int:
        """Return the number of recorded steps."""
        return sum(map(len, self.rewards.values()))

    def root(self, given: Tensor, out: Any) -> None:
        """Note observations that a model got, and values: outputs with one number for each."""
        if self.where and given.dim() and len(self.calls) < ROWS:
            rows = given.detach().float().cpu().numpy().reshape(-1, given.shape[-1])
            self.inputs |= {np.ascontiguousarray(row).tobytes() for row in rows[: ROWS - len(self.inputs)]}
            self.calls.append(self.count)
        if not self.where or len(self.values) > 64 or not given.dim() or len(given) < 16:
            return
        home = address_of(given)
        for y in tensors(out):
            if y.requires_grad and y.numel() == len(given):
                found = to_double(y.detach().flatten())

                def pulled(grad: Tensor, v: Tensor = found) -> None:
                    self.values.setdefault((self.count, home), (v, to_double(grad.flatten())))

                on_gradient(y, pulled)

    def guess(self, given: Tensor, out: Any) -> None:
        """Note a critic's value of one observation: the only output of one number beside a policy's."""
        if not self.where or len(self.guesses) >= ROWS or given.dim() > 2 or (given.dim() == 2 and len(given) > 1):
            return
        single = [y for y in tensors(out) if y.requires_grad and y.numel() == 1]
        (place,) = self.places(given.detach().float().cpu().numpy().reshape(1, -1))
        if len(single) == 1 and place:
            self.guesses[place] = float(single[0].detach())

    def to_go(self, env: int, start: int, end: int, row: int) -> list[float]:
        """Return the decayed sums of rewards from each step of a part to its end, or to the end of the episode."""
        found, total = [], 0.0
        for t in reversed(range(start, end)):
            row_of = min(row, len(self.rewards[env][t]) - 1)
            total = float(self.rewards[env][t][row_of]) + DECAY * total * (not self.ends[env][t][row_of])
            found.append(total)
        return found[::-1]


def so_far(one: Credit, env: int, start: int, end: int, row: int) -> list[float]:
    """Return the decayed sums of rewards from the beginning of a part, or of the episode, to each of its steps."""
    found, total = [], 0.0
    for t in range(start, end):
        row_of = min(row, len(one.rewards[env][t]) - 1)
        begins = t > start and one.ends[env][t - 1][row_of]
        total = float(one.rewards[env][t][row_of]) + DECAY * total * (not begins)
        found.append(total)
    return found


def check(one: Credit) -> tuple[tuple[str, str] | None, str]:
    """Return what is wrong with the weights of actions, and what was measured."""
    weights: dict[tuple[int, int, int], float] = {}
    parts: dict[tuple[int, int, int], list[int]] = {}
    for rollout, batch in one.batches:
        for (env, t, row), weight in normalised(batch):
            weights[env, t, row] = weight
            parts.setdefault((env, row, rollout), []).append(t)
    ahead, mirrored, past, got = [], [], [], []
    for (env, row, _), times in parts.items():
        for part in runs(sorted(times), len(one.rewards[env])):
            sums = one.to_go(env, part[0], part[-1] + 1, row)
            mine = np.array([weights[env, t, row] for t in part])
            mirror, before = sums[::-1], so_far(one, env, part[0], part[-1] + 1, row)
            if all((env, t, row) in one.guesses for t in part):  # what the critic subtracts says nothing on the order
                values = np.array([one.guesses[env, t, row] for t in part])
                if min(np.std(left_over(np.array(x), values)) for x in (sums, mirror)) < 0.1 * np.std(sums):
                    continue
                mine, sums, mirror, before = (left_over(np.array(x), values) for x in (mine, sums, mirror, before))
            if len(got) < FIRST and np.std(sums) > 0 and np.std(mine) > 0:
                level = [(x - np.mean(x)) / max(float(np.std(x)), 1e-12) for x in (sums, mirror, before, mine)]
                for rows, x in zip((ahead, mirrored, past, got), level, strict=True):
                    rows += x.tolist()
    if len(got) < 128 or one.again > 0.05 * len(one.where):
        return None, ""
    follows, against = pearson(got, ahead), pearson(got, mirrored)
    measured = f"weights of {len(got)} actions: correlation with the rewards that follow {follows:.2f}, in mirrored time {against:.2f}"
    if follows < -0.6:
        cause = "the policy's loss has the wrong sign: actions before high rewards become rarer"
        mirror = "advantages or returns are collected in reversed time; or " if against > 0.6 else ""
        return (measured, mirror + cause), measured
    earlier = pearson(got, past)
    if follows < 0.3 and earlier > EARLIER and earlier > against:
        return (
            f"weights of {len(got)} actions: correlation with the rewards that follow {follows:.2f}, with those up to the action {earlier:.2f}",
            "returns are summed from the first step to the last, in reversed time: actions get the credit of earlier ones. Sum from the end",
        ), measured
    if follows < 0.3 and against > 0.6:
        return (
            measured,
            "advantages or returns are collected in reversed time: actions get the credit of other steps",
        ), measured
    others = [
        place for place, action in one.scored.items() if place in weights and one.played.get(place, action) != action
    ]
    if len(others) > 0.05 * len(weights) and np.std(got) > 0:  # equal weights: another policy's actions are learnt
        return (
            f"at {len(others)} of {len(weights)} steps the log-probability is not that of the action that was played",
            "log_prob() gets a new sample, or actions and observations are paired wrongly: keep the action that env.step() gets",
        ), measured
    if text := critic(one):
        return (text, "the critic is trained on the advantages: returns = advantages + values is meant"), measured
    return None, measured


def unmoved(one: Credit) -> tuple[str, str] | None:
    """Find a policy that gets the first observations again and again while its environments go on."""
    steps = one.calls[-1] - one.calls[0] if one.calls else 0
    rows = 1 + max((row for *_, row in one.where.values()), default=0)
    if min(len(one.calls), steps, len(one.where)) < UNMOVED or len(one.inputs) > rows:
        return None
    return (f"the model gets the same {len(one.inputs)} observations at all {len(one.calls)} calls, while the environments return "
            f"{len(one.where):,} others in {steps:,} steps",
            "the new observation is never made the current one: obs = next_obs is missing after env.step()")  # fmt: skip


def critic(one: Credit) -> str:
    """Return what is wrong with a critic's targets. In the first batch after a rollout the gradient of a critic that learns
    returns (advantages + its own values) is proportional to the advantages."""
    first: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for key, weights in one.weights.items():
        if key in one.values and key[0] not in first:
            value, grad = one.values[key]
            if len(value) == len(weights):
                first[key[0]] = weights, value, grad
    share = unexplained_share
    left = [(share(grad, weights), share(grad, weights, value)) for weights, value, grad in first.values()]
    if len(left) >= 3 and all(a > 3e-3 and b < 0.03 * a for a, b in left):
        return "the critic's targets lack its own values: advantages, and not returns (advantages + values)"
    return ""


def normalised(batch: list[tuple[tuple[int, int, int], float]]) -> list[tuple[tuple[int, int, int], float]]:
    """Return the weights of one batch with the scale of the others'."""
    values = np.array([w for _, w in batch])
    if len(batch) < 2:
        return batch
    return [(p, (w - values.mean()) / (values.std() + 1e-12)) for p, w in batch] if values.std() > 0 else []


def runs(times: list[int], count: int) -> list[list[int]]:
    """Return the parts of at least eight consecutive steps whose rewards are known."""
    found: list[list[int]] = []
    for t in times:
        if t >= count:
            continue
        if found and found[-1][-1] == t - 1:
            found[-1].append(t)
        else:
            found.append([t])
    return [part for part in found if len(part) >= 8]


def left_over(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return what a straight line over x leaves of y."""
    if np.std(x) == 0:
        return y - y.mean()
    return y - np.polyval(np.polyfit(x, y, 1), x)
