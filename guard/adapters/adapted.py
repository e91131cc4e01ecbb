"""Gates on a script: which of them do not apply, likely causes in a script's words, and how a failure is repeated."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates.causes.gradient import UNEXPLAINED
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.guard.adapters import observed, own_loop
from trainworthy.guard.adapters.objective import Objective
from trainworthy.guard.adapters.subject import Subject

if TYPE_CHECKING:
    from trainworthy.guard.adapters.script_stage import Script

REMEDIES = {
    "schema": "the validation set augments, or draws random numbers without the generator\n"
    "the data set keeps its own generator: every loader worker repeats its draws\n"
    "the training and the validation set differ in shape or dtype",
    "schedule": "a scheduler that ends in zeros or non-finite rates",
    "range-test": "the rate was carried over from another optimiser, batch size or data set",
    "dependency": "statistics over the batch axis (own normalisation, x.mean(0)), or a reshape that mixes samples\n"
    "a (B, 1) against (B,) broadcast in the loss\n"
    "the loss is a sum, or a mean over something else than samples (tokens, weights): set count=\n"
    "the model may read padding (a convolution at its border): batch_dependence='padding'",
    "overfit": "wrong formula or target: softmax before cross-entropy, labels that do not belong to their inputs\n"
    "gradients do not arrive (see wiring), or the rate is far too low or too high for 8 samples\n"
    "metric() reads other labels or inputs than loss()\n"
    "loss_floor= is not set (label smoothing eps over K classes: -p ln p - (K - 1) q ln q,\n"
    "  where q = eps/K and p = 1 - eps + q), or too few steps (overfit_steps=)",
    "evaluation": "metric() does not call model.eval(), or dropout ignores the mode\nthe validation set draws at random\n"
    "model.eval() in metric() without model.train() at the start of train_loop()\na mean over batch means",
    "accumulation": "the loss is a mean over something else than samples (tokens): set count=\n"
    "samples of a batch influence each other (see dependency)",
    "loader": "the data set keeps its own generator: every loader worker has a copy and repeats its draws\n"
    "the data set seeds a generator by itself (manual_seed in __getitem__), or keeps what it has once augmented\n"
    "the factory splits the data by process",
    "resume": "save() leaves something out, or load() does not put it back: weights, optimiser, what train_loop counts",
}
"""Likely causes in terms of a script, where a recipe's differ."""
MORE = {
    "wiring": "\nrequires_grad was switched off on purpose: frozen=('prefix',)\nloss= is not what train_loop calls backward() on"
}
"""What a script adds to the causes of a recipe."""
METRIC_DIFFERS = (
    "metric() reads other labels or inputs than loss(), or reads the answers differently (threshold, axis, order of classes, unit)\n"
    "train augments inputs and not their targets: the same samples with new draws have other answers"
)
"""The same of `overfit`, if the loss is at its floor and the metric is not at its goal."""
NO_LOOP = "train_loop= is not set: core's loop trains, without the script's schedule"
ITS_OWN_TARGET = "neither loss nor metric depends on a target besides the input: there is nothing to exchange"


def skips(script: "Script", found: Objective) -> dict[str, str]:
    """Return the gates that do not apply to a script."""
    divides = "train_loop divides batches itself: wiring checks the gradients that its optimiser gets"
    return {
        "initial-loss": "initial_loss= is not set" if script.initial_loss is None else "",
        "init": "the factory decides which weights are loaded",
        "schedule": "" if script.train_loop else NO_LOOP,
        "accumulation": divides if script.train_loop else "",
        "range-test": "how long the script trains is not known: trainworthy.LRFinder tests the rate",
        "resume": "" if script.save else "save= and load= are not set",
        **(dict.fromkeys(("baseline", "tiny-data"), ITS_OWN_TARGET) if found.own_target else {}),
    }


def adapted(gate: Gate, subject: Subject) -> Gate:
    """Return the same gate for a script: inapplicable checks are skipped, and causes use the script's terms."""

    def check(context: GateContext) -> Finding:
        if reason := subject.skips.get(gate.id):
            raise Skip(reason)
        if subject.own_loop:
            context.cfg.optim.clip = _clip(context) if gate.id == "wiring" else float("inf")
        finding = gate.check(context)
        unexplained = subject.own_loop and finding.cause.startswith(UNEXPLAINED) and "; " not in finding.measured
        if unexplained and (other := own_loop.other_loss(context)):
            raise Skip(other)
        if gate.id == "wiring" and not finding.ok and (not finding.cause or unexplained) and subject.see:
            finding.cause = observed.why_untrained(subject.see) or finding.cause
        if not finding.ok:
            finding.cause = subject.causes.get(gate.id) or finding.cause
        curve = finding.evidence.get("curve") if gate.id == "overfit" else None
        learnt = curve and curve[-1][1] <= finding.evidence["needed_loss"]
        finding.remedy = METRIC_DIFFERS if learnt else REMEDIES.get(gate.id) or finding.remedy + MORE.get(gate.id, "")
        return observed.joined(finding, gate.id, subject.see) if subject.see and gate.id in observed.SHARED else finding

    return replace(gate, check=check)


def _clip(context: GateContext) -> float:
    """Return the norm at which the script's loop clips, if it does: no gradient in the optimiser was larger."""
    from trainworthy.core.gates.recorder import rehearsed

    return max((g["norm"] for g in rehearsed(context)[2].gradients), default=float("inf"))


def again(factory: Callable, seed: int, gate: str) -> str:
    """Return the lines of a repro that run the gate again, for a factory at the top level of a file."""
    call = f"only={gate!r}, seed={seed})"
    if not inspect.isfunction(factory) or factory.__qualname__ != factory.__name__:
        return f"# where the factory is at hand: trainworthy.check(factory, {call}"
    path = str(Path(inspect.getsourcefile(factory) or "").resolve())
    return (
        "import runpy\n\nimport trainworthy\n\n"
        f"sys.path.insert(0, {str(Path(path).parent)!r})\n"
        f"script = runpy.run_path({path!r})\ntrainworthy.check(script[{factory.__name__!r}], {call}"
    )
