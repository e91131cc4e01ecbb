"""Every check of a watched run, in order."""

import time
from typing import Any

import torch
from trainworthy.core.guard import (
    behaviour,
    causality,
    checks,
    ending,
    facts,
    following,
    graph,
    invariants,
    objectives,
    progress,
    samples,
    schedules,
)
from trainworthy.core.guard.observer import Observer


def check(seen: Observer, plan: Any) -> dict[str, Any]:
    """What every check says of one run; on a run with changed data only the facts that `interventions` compares."""
    if plan.name in ("trained", "held"):
        return {"progress": progress.facts(seen)}
    if isinstance(seen, following.Following):
        kept = seen.rounds.rows if seen.held or seen.loads else []
        return {
            "findings": [ending.check(seen)],
            "rounds": kept,
            "later": seen.later(),
            "progress": progress.facts(seen),
        }
    if plan.name == "oracle":
        return {"oracle": seen.control.oracle.facts()}
    if plan.name not in ("watch", "later"):
        return {"facts": facts.of(seen)}
    judges = (
        invariants.finite,
        graph.wiring,
        graph.gradients,
        graph.clipping,
        schedules.schedule,
        behaviour.frozen,
        behaviour.modes,
        behaviour.evaluated,
        causality.dependency,
        facts.targets,
        objectives.direction,
        objectives.noise,
        facts.loss_input,
        samples.samples,
        samples.passes,
        behaviour.state,
        facts.learning,
    )
    found = []
    for one in judges:
        began = time.monotonic()
        try:
            with torch.no_grad():
                found.append(one(seen))
        except Exception as error:
            found.append(
                checks.skip(
                    one.__name__.replace("_", "-"), f"could not be checked: {type(error).__name__}: {error}"[:300]
                )
            )
        found[-1]["seconds"] = time.monotonic() - began
    return {"findings": found, "facts": facts.of(seen)}
