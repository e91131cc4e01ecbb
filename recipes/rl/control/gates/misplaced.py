"""Names rows of a batch that do not belong together: observations, actions and returns of different steps."""

import torch
from torch import Tensor

EXACT = 1e-5  # relative to the largest return: a return of another step is equal up to rounding
SOME = 8  # rows that must show it
FOLLOWING = (
    "each observation is stored with the action before it: the row is built after the environments have stepped, and reads the observation "
    "that followed"
)
BEFORE = "each observation is stored with the action after it: the row is one step late"
OVERWRITTEN = (
    "steps of a rollout hold the same observations ({n} different ones in {rows} rows, {played} were played): they are views of one buffer, "
    "which the next step overwrites; store a copy"
)
UNKNOWN_ACTIONS = (
    "the stored actions are not those that were taken at their observations: they are of other steps, or were changed"
)
UNKNOWN = "the observations were changed before they were stored: {share:.0%} of the rows hold none that was played"
OTHER_STEPS = (
    "{what} belong to other steps: each is that of a step of the rollout, but not of the row's own (flattened or ordered along another axis "
    "than the observations)"
)


def key(row: Tensor) -> bytes:
    return row.contiguous().numpy().tobytes()


def of_rows(rows: dict[str, Tensor], steps: dict[str, Tensor]) -> str:
    """Return why rows (N, ...) of `observation` and `action` are no steps (T, environments, ...) that were played; "" if that is not known."""
    seen, done = (steps[k].cpu() for k in ("observation", "action"))
    played, taken = seen.flatten(0, 1), done.flatten(0, 1).reshape(seen.shape[0] * seen.shape[1], -1)
    mine = [
        (key(o), key(a.to(taken.dtype).reshape(-1))) for o, a in zip(rows["observation"], rows["action"], strict=True)
    ]
    if len(mine) < SOME:
        return ""
    known = {key(o) for o in played}
    wide = seen.shape[1]
    for cause, observations, actions in (
        (FOLLOWING, played[wide:], taken[:-wide]),
        (BEFORE, played[:-wide], taken[wide:]),
    ):
        pairs = {(key(o), key(a)) for o, a in zip(observations, actions, strict=True)}
        if sum(pair in pairs for pair in mine) >= 0.9 * len(mine):  # the last step of a rollout has none after it
            return cause
    different = len({o for o, _ in mine})
    if different <= len(mine) // 3 and len(known) > len(mine):
        return OVERWRITTEN.format(n=different, rows=len(mine), played=f"{len(known):,}")
    if all(o in known for o, _ in mine):
        return UNKNOWN_ACTIONS
    return UNKNOWN.format(share=sum(o not in known for o, _ in mine) / len(mine))


def of_numbers(what: str, found: list[float], every: Tensor) -> str:
    """Return that the numbers `found`, which are not those of their own steps, are all among those of the whole rollout, `every`; "" if
    they are not, or if the rollout has too few different ones."""
    ordered = every.flatten().double().sort().values
    size = ordered.abs().max().clamp_min(1e-9)
    if len(found) < SOME or len((ordered / (EXACT * size)).round().unique()) < 4 * SOME:
        return ""
    at = torch.searchsorted(ordered, torch.tensor(found, dtype=torch.float64)).clamp(1, len(ordered) - 1)
    near = torch.stack([ordered[at], ordered[at - 1]])
    off = (near - torch.tensor(found, dtype=torch.float64)).abs().amin(0)
    return OTHER_STEPS.format(what=what) if (off <= EXACT * size).all() else ""
