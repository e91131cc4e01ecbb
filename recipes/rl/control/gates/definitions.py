"""Training targets of PPO, DQN and SAC, computed from their definitions for single played steps; the gate `returns` compares
them. Each function returns {compared quantity: (largest relative difference, the likely cause)}."""

from functools import partial
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from trainworthy.recipes.rl.control.gates import formulas, misplaced, other_targets, shaping
from trainworthy.recipes.rl.control.gates.formulas import outputs

if TYPE_CHECKING:
    from trainworthy.recipes.rl.control.gates.recording import Seen

ROWS = 48
SUBSETS = 200  # of several critics that are tried, the smallest first: all pairs of 20
CAUSES = {
    "played": "observations are stored with another step's action, or are views that are overwritten\n"
              "observations are changed before they are stored, or the stored actions are not those taken",
    "stored": "the stored log-probabilities change between passes over a rollout (computed again, or kept by reference)\n"
              "they belong to other actions than those taken",
    "estimate": "advantage estimation: gamma or lambda is missing, applied twice or exchanged\n"
                "the episode-end mask is one step off, or returns are not advantage + value",
    "values": "the stored values change within one update epoch, or belong to another step",
    "advantages": "advantages belong to other steps\n"
                  "advantages are changed by more than shift and scale (clipped, ranked, lambda missing)",
    "dqn": "`double` or `n_step` is not applied: the target is n rewards plus the target network's value of the online net's best action\n"
           "the discount has another power, or a return continues past the end of an episode\n"
           "units are mixed up: the target network's values are in units of its own statistics",
    "sac": "the entropy is missing in the target, has the wrong sign, or is weighted by the temperature's logarithm\n"
           "only one critic is used: the target is reward + gamma x (lower target critic - temperature x log-probability)\n"
           "a terminated episode is bootstrapped, or rewards and values are in different units",
}  # fmt: skip
Compared = dict[str, tuple[float, str]]


def mistakes_of_dqn(cfg: Any, unit: float) -> dict[str, dict[str, Any]]:
    """Known mistakes, as variants of the definition."""
    return {
        "units are mixed up: rewards are unscaled, but the target network's value is in units of the return scale": {
            "size": 1.0
        },
        "units are mixed up: the target network's value is scaled by the online network's return scale": {"size": unit},
        "the discount of the bootstrapped value has one power too few": {"late": 0},
        "the bootstrapped value is discounted by one step instead of `n_step`": {"late": 2 - cfg.n_step},
        "the return has one step, although `n_step` is larger": {"n": 1},
        "`double` is not applied" if cfg.double else "the online net chooses the action, although `double` is off": {
            "double": not cfg.double
        },
        "the action is chosen at the present observation, and evaluated at the one that follows": {
            "choice": "observation"
        },
        "a truncated episode is treated as terminated: its bootstrapped value is missing": {"ends": "done"},
        "a terminated episode is treated as truncated: it is bootstrapped": {"ends": "truncated"},
        "the target bootstraps from the state before the last action, not from the state after it": {
            "state": "observation"
        },
    }


def mistakes_of_gae(cfg: Any, over: list[list[bool]], never: list[list[bool]]) -> dict[str, dict[str, Any]]:
    """The same of generalised advantage estimates. `over`: an episode ends with this step, by termination or time limit."""
    gamma, lam = cfg.gamma, cfg.gae_lambda
    return {
        f"gamma and lambda are exchanged: the discount is {lam:g}, lambda {gamma:g}": {"gamma": lam, "lam": gamma},
        "lambda is missing: later differences are discounted by gamma alone": {"lam": 1.0},
        "gamma is missing: nothing is discounted": {"gamma": 1.0},
        "gamma is missing in the weight of later differences": {"lam": lam / max(gamma, 1e-9)},
        "lambda is applied twice": {"lam": lam**2},
        "only one step is estimated: later differences are left out (lambda 0)": {"lam": 0.0},
        "a truncated episode is treated as terminated: its bootstrapped value is missing": {"ends": over},
        "a terminated episode is treated as truncated: it is bootstrapped": {"ends": never},
        "the estimate crosses the end of an episode": {"stop": False},
    }


def rows_of(seen: "Seen") -> tuple[dict[str, Tensor], list[list[tuple[int, int]]]]:
    """Return (at most ROWS rows of the batch, on the CPU; for each the (step, environment) pairs that have its observation and action)."""
    batch, steps, ends = seen.batch, seen.steps, seen.batch["return"].ndim - 1
    rows = {k: v.flatten(0, ends).cpu() for k, v in batch.items() if isinstance(v, Tensor)}
    n = len(rows["return"])
    rows = {k: v[:: max(1, n // ROWS)][:ROWS] for k, v in rows.items()}
    flat = {k: steps[k].flatten(0, 1) for k in ("observation", "action")}
    flat["observation"] = as_stored(flat["observation"], rows["observation"])
    wide, places = steps["reward"].shape[1], []
    for seen_now, done in zip(rows["observation"], rows["action"], strict=True):
        same = (flat["observation"] == seen_now).flatten(1).all(1) & (flat["action"] == done).view(
            len(flat["action"]), -1
        ).all(1)
        places.append([divmod(i, wide) for i in same.nonzero().flatten().tolist()])
    return rows, places


def as_stored(played: Tensor, stored: Tensor) -> Tensor:
    """Return the observations that were played as the rows `stored` hold them: rounded to half precision or bfloat16 (a replay buffer of half the
    size) if only then they are among them."""
    forms = [played]
    if played.is_floating_point():
        forms += [played.to(kind).to(played.dtype) for kind in (torch.float16, torch.bfloat16)]
    return max(forms, key=lambda form: sum(bool((form == row).flatten(1).all(1).any()) for row in stored[:8]))


def gap(found: float, due: list[float]) -> float:
    """Return the distance to the nearest candidate: a step may equal another one."""
    return min((abs(found - d) for d in due), default=float("inf"))


def clipped(found: list[float], due: list[list[float]]) -> str:
    """Return what two bounds, to which every target that differs from its definition was set, say; empty if bounds do not explain it."""
    low, high, at, free = min(found), max(found), [], []
    size = max(max((abs(d) for some in due for d in some), default=0.0), 1e-9)
    for f, some in zip(found, due, strict=True):
        if not some or gap(f, some) <= 1e-3 * size:
            free.append(f)
            continue
        beyond = min(some) > high if f == high else max(some) < low if f == low else False
        if not beyond:
            return ""
        at.append(f)
    bounds = " or ".join(f"{b:.3g}" for b in sorted(set(at)))
    if len(at) < 2 or not set(free) - set(at):  # where all are one number, it may be another mistake
        return ""
    return f"the targets are clipped: {len(at)} of {len(found)} are {bounds}, the definition goes beyond"


def rescaled(pairs: list[tuple[float, float]], scale: float) -> str:
    """Return the line that makes `return - value` of the advantage, from (advantage, return - value); empty if it is the advantage, or
    none does."""
    if len(pairs) < 8:
        return ""
    x, y = torch.tensor(pairs, dtype=torch.float64).T
    slope = ((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum().clamp_min(1e-12)).item()
    offset = (y.mean() - slope * x.mean()).item()
    exact = (y - slope * x - offset).abs().max() <= 1e-3 * min(scale, y.std().item())
    if not exact or slope <= 0 or (abs(slope - 1) <= 1e-2 and abs(offset) <= 1e-2 * scale):
        return ""
    return f"returns are made of advantages that were normalised before: return - value is {slope:.3g} x advantage {offset:+.3g}"


def measured(compared: "Compared") -> str:
    """Return the first cause that numbers support, not only a list; empty if there is none."""
    causes = [cause for off, cause in compared.values() if not off <= 1e-3 and cause not in CAUSES.values()]
    return causes[0].splitlines()[0] if causes else ""


def unplayed(seen: "Seen", rows: dict[str, Tensor], places: list[list[tuple[int, int]]]) -> Compared:
    """Return the rows that no environment produced."""
    share = sum(not p for p in places) / max(len(places), 1)
    known = misplaced.of_rows(rows, seen.steps) if share else ""
    return {"observations and actions": (share, f"{known}\n{CAUSES['played']}" if known else CAUSES["played"])}


@torch.no_grad()

# ------------------------------------------------------------------------------------------------------------------ PPO
def ppo(cfg: Any, seen: "Seen") -> Compared:
    """Generalised advantage estimates (Schulman 2016, equation 16) at the configured gamma and lambda, and the stored rollout in the last
    pass over it. Values may be estimated again at the beginning of a pass."""
    rows, places = rows_of(seen)
    first = seen.iteration.index(1)
    places = [[(t, i) for t, i in some if t >= first] for some in places]
    out = unplayed(seen, rows, places)
    if out["observations and actions"][0]:
        return out
    device = next(seen.model.parameters()).device
    with torch.no_grad(), seen.run.autocast():
        outputs = seen.begins[0](rows["observation"].to(device))[0]
        log_prob = formulas.distribution(seen.begins[0], outputs, rows["action"].to(device))[0].float().cpu()
    off = (rows["log_prob"] - log_prob).abs().max().item()
    out["log-probabilities of the rollout"] = (off, CAUSES["stored"])
    size = seen.model.returns.rms.item()
    tries = [_ppo_values(cfg, seen, begin, places, rows, size) for begin in seen.begins]
    best = min(tries, key=lambda one: sum(v for v, _ in one.values()))
    return out | best


def _ppo_values(cfg: Any, seen: "Seen", net: nn.Module, places: list, rows: dict, size: float) -> Compared:
    steps = seen.steps
    with seen.run.autocast():
        value, following = (outputs(net.value, steps[k], net).tolist() for k in ("observation", "next_observation"))
    reward, over = steps["reward"].tolist(), (steps["terminated"] | steps["truncated"]).tolist()
    ended = steps["terminated"].tolist()

    def estimate(t: int, i: int, gamma: float = cfg.gamma, lam: float = cfg.gae_lambda, *, stop: bool = True,
                 ends: list[list[bool]] = ended) -> float:  # fmt: skip
        total, weight = 0.0, 1.0
        for k in range(t, len(reward)):
            total += weight * (reward[k][i] + gamma * following[k][i] * (not ends[k][i]) - value[k][i])
            weight *= gamma * lam
            if over[k][i] and stop:
                break
        return total

    def far(due: list[list[tuple[float, float]]]) -> float:
        pairs = zip(rows["return"].tolist(), due, strict=True)
        return max(gap(r * size, [a + v for a, v in some]) for r, some in pairs)

    def all_due(**how: Any) -> list[list[tuple[float, float]]]:
        return [[(estimate(t, i, **how), value[t][i]) for t, i in some] for some in places]

    due = all_due()
    scale = max(max(abs(a + v) for some in due for a, v in some), 1e-9)
    returned = far(due)
    stored = max(gap(r * size, [v for _, v in some]) for r, some in zip(rows["value"].tolist(), due, strict=True))
    pairs = [
        (some[0][0], r * size - some[0][1])
        for r, some in zip(rows["return"].tolist(), due, strict=True)
        if len(some) == 1
    ]
    known = rescaled(pairs, scale) if returned > 1e-3 * scale else ""
    if returned > 1e-3 * scale and not known:
        mistakes = mistakes_of_gae(cfg, over, [[False] * len(row) for row in over])
        known = next((name for name, how in mistakes.items() if far(all_due(**how)) <= 1e-3 * scale), "")
    if returned > 1e-3 * scale and not known:
        found = [r * size for r in rows["return"].tolist()]
        sums = {"decay": cfg.gamma * cfg.gae_lambda, "over": steps["terminated"] | steps["truncated"]}
        shaped = shaping.compared(seen, places, found, [[a + v for a, v in some] for some in due], sums,
                              lambda seen: _ppo_values(cfg, seen, net, places, rows, size), "returns")  # fmt: skip
        if shaped:
            return shaped
        played = range(seen.iteration.index(1), len(reward))
        every = torch.tensor([[estimate(t, i) + v for i, v in enumerate(value[t])] for t in played])
        known = misplaced.of_numbers("returns", [r * size for r in rows["return"].tolist()], every)
    out = {
        "returns": (returned / scale, f"{known}\n{CAUSES['estimate']}" if known else CAUSES["estimate"]),
        "values of the rollout": (stored / scale, CAUSES["values"]),
    }
    single = [(some[0][0], a) for a, some in zip(rows["advantage"].tolist(), due, strict=True) if len(some) == 1]
    if len(single) >= 8:
        x, y = torch.tensor(single, dtype=torch.float64).T
        slope = ((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum().clamp_min(1e-12)).item()
        line = y.mean() + slope * (x - x.mean())
        off = (y - line).abs().max().item() / max(y.std().item(), 1e-9)
        if x.std() > 1e-6 * scale:
            out["advantages"] = (off if slope > 0 else max(off, 1.0), CAUSES["advantages"])
    return out


# ------------------------------------------------------------------------------------------------------------------ DQN
def dqn(cfg: Any, seen: "Seen") -> Compared:
    """The sum of n discounted rewards of an episode, plus the target network's value of the action that the online network (double DQN) or
    the target network itself selects."""
    rows, places = rows_of(seen)
    out = unplayed(seen, rows, places)
    if out["observations and actions"][0]:
        return out
    steps = seen.steps
    done, reward = steps["terminated"] | steps["truncated"], steps["reward"]
    size = seen.target.returns.rms.item()

    def targets(t: int, i: int, *, size: float = size, n: int = cfg.n_step, double: bool = cfg.double, late: int = 1,
                ends: str = "terminated", state: str = "next_observation", choice: str = "", random: float = 0) -> float | None:  # fmt: skip
        total = 0.0
        for k in range(n):
            if t + k >= len(reward):
                return None  # not yet played when it was drawn
            total += cfg.gamma**k * reward[t + k, i].item()
            if done[t + k, i]:
                break
        if (done if ends == "done" else steps[ends])[t + k, i]:
            return total
        after = steps[state][t + k, i][None]
        worth = outputs(seen.target, after, seen.target)[0]
        read = steps[choice][t, i][None] if choice else after
        liked = outputs(seen.model, read, seen.model)[0] if double else worth
        near = liked >= liked.max() - 1e-6 * liked.abs().max()  # two actions may have equal values up to rounding
        value = (1 - random) * worth[near].max() + random * worth.mean()
        return total + cfg.gamma ** (k + late) * size * value.item()

    unit = seen.model.returns.rms.item()

    def all_due(**how: Any) -> list[list[float]]:
        with seen.run.autocast():
            return [[d for t, i in some if (d := targets(t, i, **how)) is not None] for some in places]

    def error_of(**how: Any) -> float:
        """Return the largest relative difference of the batch's targets from this definition."""
        due = all_due(**how)
        scale = max(max((abs(d) for some in due for d in some), default=0.0), 1e-9)
        return max(gap(r * unit, some) for r, some in zip(rows["return"].tolist(), due, strict=True)) / scale

    off, cause = error_of(), CAUSES["dqn"]
    if off > 1e-3:  # find the known mistake that fits
        fits = (name for name, how in mistakes_of_dqn(cfg, unit).items() if error_of(**how) <= 1e-3)
        known = next(fits, "")
        found = [r * unit for r in rows["return"].tolist()]
        if not known and (soft := other_targets.munchausen(cfg, seen, places, found)):
            return out | {soft: (0.0, cause)}
        rate = other_targets.exploring(found, all_due(), all_due(random=1))
        if not known and 0 < rate < 0.5 and error_of(random=rate) <= 1e-3:
            return out | {
                f"targets of a policy that explores with probability {rate:.2g} (expected SARSA)": (0.0, cause)
            }
        sums = {"decay": cfg.gamma, "over": done, "length": cfg.n_step}
        if not known and (
            shaped := shaping.compared(seen, places, found, all_due(), sums, partial(dqn, cfg), "targets")
        ):
            return shaped
        known = known or seen.misstored or clipped(found, all_due())
        cause = f"{known}\n{cause}" if known else cause
    out["targets"] = (off, cause)
    return out


# ------------------------------------------------------------------------------------------------------------------ SAC
def sac(cfg: Any, seen: "Seen") -> Compared:
    """The reward plus the lower target critic's value of a newly drawn action, minus the temperature times its log-probability (Haarnoja
    2018, equations 3 and 5). Of more than two critics, the lowest of a subset is as right (REDQ, Chen 2021)."""
    rows, places = rows_of(seen)
    out = unplayed(seen, rows, places)
    if out["observations and actions"][0]:
        return out
    observation, action, log_prob = (t.cpu() for t in seen.sampled)
    device = next(seen.target.parameters()).device
    with torch.no_grad(), seen.run.autocast():
        read = seen.target.scaled(observation.to(device))
        every = formulas.critics(seen.target.critics, read, action.to(device)).float().cpu()  # (critics, B)
    steps, unit = seen.steps, seen.model.rewards.rms.item()

    def all_due(worth: Tensor) -> list[list[float]]:
        entropy = seen.model.log_temperature.exp().cpu() * log_prob * seen.model.rewards.rms.cpu()
        soft = worth * seen.target.rewards.rms.cpu() - entropy
        due: list[list[float]] = []
        for some in places:
            due.append([])
            for t, i in some:
                for j in (observation == steps["next_observation"][t, i]).all(-1).nonzero().flatten().tolist():
                    alive = not steps["terminated"][t, i]
                    due[-1].append(steps["reward"][t, i].item() + cfg.gamma * alive * soft[j].item())
        return due

    def error_of(due: list[list[float]]) -> float:
        scale = max(max(abs(d) for some in due for d in some), 1e-9)
        return max(gap(r * unit, some) for r, some in zip(rows["return"].tolist(), due, strict=True)) / scale

    due = all_due(every.amin(0))
    if not all(due):
        raise KeyError("next actions are not drawn by model.sample(next_observation, noise)")
    off = error_of(due)
    if off > 1e-3 and len(every) > 2:
        n = len(every)
        subsets = (s for k in range(2, n) for s in combinations(range(n), k))
        off = min([off, *(error_of(all_due(every[list(s)].amin(0))) for s in islice(subsets, SUBSETS))])
    found = [r * unit for r in rows["return"].tolist()]
    known = seen.misstored or clipped(found, due) if off > 1e-3 else ""
    if off > 1e-3:
        sums = {"decay": 1.0, "over": steps["terminated"] | steps["truncated"], "length": 1}
        if shaped := shaping.compared(seen, places, found, due, sums, partial(sac, cfg), "targets"):
            return shaped
    out["targets"] = (off, f"{known}\n{CAUSES['sac']}" if known else CAUSES["sac"])
    return out
