"""The gate on exploration: actions in training are random as long as the settings say, then those of the learnt policy."""

import math
from collections.abc import Callable

import torch
from torch import nn
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.rl.control.gates.learning_probes import ROLLOUTS, Subject, learnt

FEWEST = 20  # expected actions other than the policy's own, below which their number says nothing
EARLY = "exploration is over too early: its schedule gets the number of the iteration where it expects the share of the run that is over"
TOO_FEW = 0.2  # of them; an exponential schedule has a third of a linear one's


def exploration_gate(subject: Subject) -> Gate:
    """Rewards in training must change from those of random actions to those of the learnt policy. With `--exploration-fraction`, actions must
    be other than the policy's own as often as an exploration that ends then makes them, in a state where no action is better."""

    @gate(
        "exploration", rows="R4", title="actions in training move from exploration to the learnt policy", symptom=True
    )
    def check(context: GateContext) -> Finding:
        rewards = learnt(context, subject, "action", rollouts=20).rewards
        share = {iteration: (torch.cat(some) > 0).double().mean().item() for iteration, some in rewards.items()}
        first, last = share[0], share[max(share)]
        over = "" if subject.box or not 0.02 <= first <= 0.98 else ended_early(context, subject)
        return Finding(
            0.02 <= first <= 0.98 and last >= 0.75 and not over,
            f"the better of two actions is taken in {first:.0%} of the steps of the first rollout and {last:.0%} of the last" + over,
            "2% to 98% in the first, at least 75% in the last" + ", and random actions until --exploration-fraction" * bool(over),
            f"{_why_unexplored(context, subject, first, last)}\n"
            "the stored actions are not those that were taken\n"
            "the better action is not learnt at all (see probe-action)", evidence={"share": list(share.values())}, cause=EARLY if over else "",
        )  # fmt: skip

    return check


def _why_unexplored(context: GateContext, subject: Subject, first: float, last: float) -> str:
    """Return the cause that fits the shares of the better action. A greedy untrained net always takes the same one of two actions;
    random actions take each half of the time."""
    greedy, random = not 0.02 <= first <= 0.98, 0.3 <= last <= 0.7
    if greedy and random:
        return "the probability of random actions is inverted, 1 - epsilon: greedy at first, random at the end"
    if greedy and not subject.box and _drawn_from_one(context, subject):
        return (
            "random actions are drawn from some of the actions only: the upper bound of randint() is exclusive already"
        )
    if greedy:
        return "no action is ever random: the untrained net's own action is taken from the start"
    return "the probability of random actions does not fall: its schedule is not advanced"


def _drawn_from_one(context: GateContext, subject: Subject) -> bool:
    """Return whether the first actions are all the same one of two, whichever of them the untrained net would take."""
    taken = [
        learnt(context, subject, "later", rollouts=1, before=_preferring(k)).other.get(0, torch.tensor([]))
        for k in (0, 1)
    ]
    return all(map(len, taken)) and sorted(other.double().mean().item() > 0.5 for other in taken) == [False, True]


def _preferring(action: int) -> Callable[[Stage], None]:
    """Return a function that makes one of two actions the own one of a stage's untrained net."""

    def prefer(stage: Stage) -> None:
        heads = [
            m for m in stage.model.modules() if isinstance(m, nn.Linear) and m.out_features == 2 and m.bias is not None
        ]
        for head in heads[-1:]:
            with torch.no_grad():
                head.bias[action] += 1

    return prefer


def ended_early(context: GateContext, subject: Subject) -> str:
    """Return that exploration is over long before its share of the run, if it is. It is counted in the first of two steps, in which both
    actions are equal, so that a policy which draws its actions by their values explores there, too."""
    fraction = getattr(context.cfg, "exploration_fraction", 0.0)
    rollouts = min(ROLLOUTS - 1, max(20, math.ceil(4 / fraction))) if fraction else 0
    last = min(rollouts, math.floor(rollouts * fraction))
    if last < 2:
        return ""
    other = learnt(context, subject, "later", rollouts=rollouts).other
    final = context.cfg.exploration_final_eps
    due = sum(len(other[i]) * (1 - (1 - final) * i / rollouts / fraction) / 2 for i in range(1, last))
    found = sum(int(other[i].sum()) for i in range(1, last))
    if due < FEWEST or found >= TOO_FEW * due:
        return ""
    return (f"; in rollouts 2 to {last} of {rollouts}, {found} actions are not the policy's own, with random actions until "
            f"--exploration-fraction {fraction:g} about {due:.0f} would be")  # fmt: skip
