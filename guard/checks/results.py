"""The checks of `guard`: what each is called and what it needs, and the form of a result."""

from collections import Counter
from typing import Any

from trainworthy.core.base.verdict import Fault, Kind, Verdict

CHECKS = {
    "finite": ("losses and gradients stay finite", "losses and gradients are finite"),
    "wiring": (
        "graph and optimiser hold the same tensors",
        "every parameter of a trained model that gets a gradient is in an optimiser, and the other way round; weights move",
    ),
    "gradients": (
        "each step uses its own gradients",
        "each step() uses the gradients of the backward() calls since the step before, all of them, once",
    ),
    "clipping": (
        "clipping between backward() and step()",
        "gradients are clipped between backward() and step(), after unscale_()",
    ),
    "schedule": (
        "the learning rate over the run",
        "the rate is positive, and at the end of the first of several epochs at least a tenth of its peak",
    ),
    "frozen": ("frozen parameters stay frozen", "what was frozen does not move, what was unfrozen is in an optimiser"),
    "modes": (
        "train and eval mode",
        "train mode while training, in which dropout drops the share that the script names; no dropout and no batch statistics while evaluating",
    ),
    "evaluated": (
        "the trained model is evaluated",
        "the model that is evaluated is the one that trains, on inputs of the same scale",
    ),
    "dependency": (
        "each output depends on its own sample",
        "in eval mode the output of a sample depends on that sample alone, and that of a token on no later one",
    ),
    "targets": (
        "targets that can be learnt",
        "targets vary, are not their own inputs, and each belongs to one prediction and its input",
    ),
    "direction": (
        "losses push in the right direction",
        "an attack raises the loss; a generator moves its samples towards what the critic takes for real; a policy follows the rewards",
    ),
    "noise": (
        "noised inputs and their time fit",
        "signal and noise are weighted by standard deviations, and the net gets the time of its input's noise",
    ),
    "loss-input": (
        "losses get the inputs they need",
        "cross_entropy and the losses with logits get logits, nll_loss and kl_div logarithms; the last layer can reach the targets",
    ),
    "samples": (
        "order, coverage and split of the samples",
        "another order every epoch; every sample can be drawn; no training sample in validation; both splits encoded alike",
    ),
    "passes": ("batches are used for training", "batches that are drawn are used for training"),
    "state": (
        "kept weights are copies",
        "a kept state_dict is a copy, a saved one is not empty, a loaded one has the names of the model",
    ),
    "learning": (
        "training and evaluation agree on new samples",
        "the evaluation is about as good as training was on samples that it saw for the first time",
    ),
    "signal": (
        "the model learns from the data",
        "new samples are answered better than by the most frequent class, once eight can be memorised; numbers follow their targets",
    ),
    "overfit": (
        "eight samples can be memorised by their inputs",
        "the loss on eight samples gets lower with their own inputs than with each other's",
    ),
    "metric": (
        "memorised samples score perfectly",
        "eight memorised samples are right in the evaluation, and in the score that the script prints",
    ),
    "names": (
        "names in the source fit each other",
        "arguments are in the order of their parameters, and each split is read by its own name",
    ),
    "ending": (
        "the script's end",
        "to the script's end: optimisers hold the model that trains, evaluations get training's scale, the best weights are kept",
    ),
    "progress": (
        "training improves the printed score",
        "the scores that the script prints are not worse than those of the same run with its weights held at their initial values",
    ),
    "later": ("a training after the first one", "a training after the first one passes the same checks"),
    "resume": (
        "a checkpoint restores the run",
        "after a restart weights, batch statistics, optimiser state and learning rate are those of the checkpoint",
    ),
    "ranks": (
        "processes train one model on different data",
        "after every step all ranks have the same weights; they train on different batches",
    ),
    "files": ("the user's files do not change", "what the script writes goes to a scratch folder"),
}
"""Of each check: its title, and what must hold."""
LEARNING = ("overfit", "signal", "metric")
"""Checks that compare rehearsals on changed data."""
OF_SCRIPTS = ("ending", "progress", "later", "resume", "ranks", "files")
"""Checks of a whole script, which a `Loop` has not."""


SYMPTOMS = ("finite", "learning", "signal", "overfit", "metric", "ending", "progress")
"""Checks that fail for many reasons. A failure of another check with `symptom` in its evidence is no more specific."""

ENDED = "the script ended"
"""Why a rehearsal ended, where nothing cut it."""


def finding(id: str, measured: str, cause: str = "", **evidence: Any) -> dict:
    """Return a check's result; `cause` makes it a failure."""
    return {"id": id, "ok": not cause, "measured": measured, "cause": cause, "evidence": evidence}


def joined(id: str, faults: list[Fault], healthy: str, **evidence: Any) -> dict:
    """Return one result of several faults; `healthy`: what was measured if there are none."""
    causes = "\n".join(cause for _, cause in faults if cause)
    return finding(id, "; ".join(what for what, _ in faults) or healthy, causes, **evidence)


def skip(id: str, why: str) -> dict:
    """Return the result of a check that does not apply."""
    return {"id": id, "skip": why}


def nearest(failed: list[Verdict]) -> Verdict:
    """Return the failed check that is nearest to the fault: one that names a line of the source, else the first that is no symptom.
    Missing gradients are a symptom, too, and nearer to the fault than a model that does not learn."""
    common = [v for v in failed if v.id not in SYMPTOMS]
    specific = [v for v in common if not v.evidence.get("symptom")]
    return next((v for v in specific if v.id == "names"), (specific or common or failed)[0])


def counted(verdicts: list[Verdict]) -> str:
    """Return how many of each kind there are."""
    kinds = Counter(v.verdict for v in verdicts)
    return ", ".join(f"{kinds[kind]} {kind}" for kind in ("pass", "fail", "skip", "waived") if kinds[kind])


def verdict(found: dict, failed: Kind, seconds: float = 0.0, reason: str = "") -> Verdict:
    """Return a result as a verdict. `failed`: what a failure is; `reason`: why it was waived."""
    title, needed = CHECKS[found["id"]]
    if "skip" in found:
        return Verdict(found["id"], "", title, "skip", "", "", "", round(seconds, 2), reason=found["skip"])
    kind: Kind = "pass" if found["ok"] else failed
    why, seconds = reason if kind == "waived" else "", round(seconds, 2)
    row = (found["measured"], needed, found["cause"], seconds)
    return Verdict(found["id"], "", title, kind, *row, evidence=found.get("evidence", {}), reason=why)
