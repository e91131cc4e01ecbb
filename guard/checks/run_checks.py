"""Every check of a watched run, in order."""

import time
from typing import Any

import torch
from trainworthy.guard.checks import (
    behaviour,
    causality,
    ending,
    graph,
    invariants,
    loss,
    objectives,
    progress,
    results,
    samples,
    schedules,
    trainers,
)
from trainworthy.guard.observing import to_the_end
from trainworthy.guard.observing.observer import Observer


def symptoms_last(found: list[dict]) -> list[dict]:
    """Put a model that died behind data from which it could not learn: the data are the cause."""
    data = any(not f.get("ok", True) and f["id"] in ("targets", "samples") for f in found)
    return sorted(found, key=lambda f: data and f.get("cause") in (causality.DEAD, causality.SELECTED))


def check(seen: Observer, plan: Any) -> dict[str, Any]:
    """What every check says of one run; on a run with changed data only the facts that `interventions` compares."""
    if plan.name in ("trained", "held"):
        return {"progress": progress.facts(seen)}
    if plan.name in ("right", "wrong"):
        return {"answers": seen.control.oracle.facts()}
    if isinstance(seen, to_the_end.Following):
        kept = seen.rounds.rows if seen.held or seen.loads else []
        return {
            "findings": [ending.check(seen)],
            "sampled": ending.sampled(seen),
            "rounds": kept,
            "later": seen.later(),
            "progress": progress.facts(seen),
        }
    if plan.name == "oracle":
        return {"oracle": seen.control.oracle.facts()}
    if plan.name not in ("watch", "later"):
        return {"facts": loss.of(seen)}
    checks = (
        invariants.finite, graph.wiring, graph.gradients, graph.clipping, schedules.schedule, behaviour.frozen,
        behaviour.modes, behaviour.evaluated, causality.dependency, loss.targets, objectives.direction,
        objectives.noise, loss.loss_input, samples.samples, samples.passes, behaviour.state, loss.learning,
    )  # fmt: skip
    found = []
    for one in checks:
        began = time.monotonic()
        try:
            with torch.no_grad():
                found.append(one(seen))
        except Exception as error:
            why = f"could not be checked: {type(error).__name__}: {error}"[:300]
            found.append(results.skip(one.__name__.replace("_", "-"), why))
        found[-1]["seconds"] = time.monotonic() - began
    facts, wrong = loss.of(seen), trainers.faults(seen)
    for i, one in enumerate(found):
        if not one.get("cause") and one["id"] in wrong:
            found[i] = {**results.finding(one["id"], *wrong[one["id"]]), "seconds": one["seconds"]}
    return {"findings": symptoms_last(found), "facts": facts, "scored": wrong.get("metric")}
