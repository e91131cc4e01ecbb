"""Gates of a teacher that returns logits: it gets pictures in its own format, and is deterministic."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base import seeds
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import Gate, GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.distill.gates.own_divergence import REVERSED, far, least_at_teacher, proportional
from trainworthy.recipes.shared.classifier import Classifier

SAMPLES = 250
LOST = 0.03  # accuracy that augmentation may cost a teacher
MOVED = 1e-5  # relative rounding error of a loss that is computed twice


def teacher(classifier: Classifier) -> Gate:
    """Return the gate on the teacher `classifier` as the loss calls it."""

    title = "the teacher is as accurate inside the loss as alone, and repeatable"

    @gate("teacher", rows="V1 C12", title=title, reads="data loss", explains=True)
    def check(context: GateContext) -> Finding:
        """Compares the output of its head while the loss of validation pictures is computed with the labels, and that loss under different
        random draws, the student in eval mode."""
        run, stage, _ = overfitted(context)
        val, inputs = stage.data["val"], []
        batch = fetch(val, pick(val, min(SAMPLES, len(val)), context.cfg.run.seed), None, run.device)
        losses: list[Tensor] = []
        with (
            classifier.head.register_forward_hook(lambda _module, _args, out: inputs.append(out.detach())),
            evaluating(stage.model),
        ):
            for draws in range(2):
                seeds.seed_global(draws)
                losses.append(sum(stage.loss(stage.model, batch).values()))
        if not inputs:
            return Finding(
                False,
                "the loss never calls the teacher",
                "teacher logits for every sample",
                "targets come from elsewhere",
            )
        right = to_double(inputs[0].argmax(1) == batch["label"]).mean().item()
        by_itself = to_double(classifier.logits(batch["image"] * 2 - 1).argmax(1) == batch["label"]).mean().item()
        change = ((losses[0] - losses[1]).abs() / losses[0].abs().clamp_min(1e-8)).item()
        return Finding(
            right >= by_itself - LOST and change <= MOVED,
            f"the teacher is right on {right:.1%} inside the loss, {by_itself:.1%} alone; computed twice, a batch's loss differs by {change:.0e}",
            f"at most {LOST:.0%} less, and at most {MOVED:g}",
            "the teacher gets the student's normalisation, scale or size, but each net has its own\n"
            "the teacher is in train mode, or dropout is applied to its output\n"
            "teacher and student get different pictures",
            batch={k: v for k, v in batch.items() if isinstance(v, torch.Tensor)},
        )  # fmt: skip

    return check


@torch.no_grad()
def agreement(classifier: Classifier, images: Tensor, logits: Tensor) -> float:
    """Return the share of images (N, C, H, W) of which the student, with logits `said` (N, classes), and the teacher say the same."""
    theirs = [int(classifier.logits(one[None] * 2 - 1).argmax(1)) for one in images]
    return sum(int(row.argmax()) == t for row, t in zip(logits, theirs, strict=True)) / len(theirs)


NEAR = {"fp32": 1e-4}  # relative difference of a sample's loss from the formula
COARSE = 5e-2  # the same in 16 bits
PAIRS = 8  # samples with a label, and as many without one


def divergence(classifier: Classifier) -> Gate:
    """Return the gate on both terms of the loss, with `classifier` as the teacher."""
    title = "both loss terms of each sample equal their formulas, with trained weights"

    @gate("divergence", rows="C1", title=title, reads="data model loss counts train", explains=True, compares_loss=True)
    def check(context: GateContext) -> Finding:
        """Compares the loss with Hinton 2015, equation 4 with T^2, per sample in double precision. It uses the overfit model, because equal
        scores of an untrained student hide several errors. If a term differs, known mistakes are computed, too."""
        (run, stage, _), cfg = overfitted(context), context.cfg
        data = stage.data["train"]
        order = pick(data, min(len(data), 64 * PAIRS), cfg.run.seed)
        flags = [bool(data.peek(i, "known")) for i in order]
        indices = [i for i, known in zip(order, flags, strict=True) if known][:PAIRS]
        indices += [i for i, known in zip(order, flags, strict=True) if not known][:PAIRS]
        batch = fetch(data, indices, cfg.run.seed, run.device)
        got: dict[str, list[float]] = {}
        with evaluating(stage.model), run.autocast():
            for i in range(len(indices)):
                one = {k: v[i : i + 1] for k, v in batch.items() if isinstance(v, Tensor)}
                for name, term in stage.loss(stage.model, one).items():
                    got.setdefault(name, []).append(float(term))
            logits = to_double(stage.model(batch["image"]))
            theirs = to_double(classifier.logits(batch["image"] * 2 - 1))
        due = _stated(cfg, {k: batch[k].cpu() for k in ("label", "known")}, logits, theirs)
        near, causes, gaps = NEAR.get(run.precision, COARSE), [], {}
        share, wrong = sum(flags) / len(flags), []
        if fault := other_share(share, len(flags), cfg.labelled, len(data.fields["label"].classes) / len(data)):
            wrong.append(fault)
            causes.append("--labelled is not applied to the training split, or to its complement")

        forms = other_forms(cfg, logits, theirs)
        with run.autocast():
            faults, own = evaluate_own_terms(stage, batch, got, due, forms, (logits, theirs), near)
        wrong += faults
        for name, (right, mistakes) in due.items():
            values = torch.tensor(got.get(name, [0.0] * len(indices)), dtype=torch.float64, device=right.device)
            gaps[name] = far(values, right)
            other = next((k for k, v in forms.items() if name == "kl" and far(values, v) <= near), "")
            if other:
                gaps[f"{name} ({other})"] = far(values, forms[other])
                del gaps[name]
            elif gaps[name] > near:
                i = int((values - right).abs().argmax())
                wrong.append(f"{name} of a sample is {values[i]:.4g}, by its formula {right[i]:.4g}")
                causes += [f"{name}: {k}" for k, v in mistakes.items() if far(values, v) <= near]
        return Finding(
            not wrong, "; ".join(wrong) or f"{share:.1%} of the labels are known; {len(indices)} samples: "
            + ", ".join([*(f"{k} within {v:.0e}" for k, v in gaps.items()), *(f"of the recipe's own: {v}" for v in own)]),
            f"--labelled; within {near:g} of (1 - w) (-ln q(label)) if the label is known, and of w T^2 sum p (ln p - ln q); terms of the "
            "recipe's own in its place: minimal where the student's scores are the teacher's",
            "a term has another formula: check sums over classes, T^2, which distribution is softened, the weight of each term\n"
            "the reverse divergence on purpose: name its term reverse_kl\n"
            "labels that are not known are used, or known ones are not\n"
            'on purpose: --gates.waive divergence --gates.because "..."',
            evidence={"gaps": gaps}, cause="; ".join(causes[:1]), batch={k: v for k, v in batch.items() if isinstance(v, Tensor)},
        )  # fmt: skip

    return check


class Answering(nn.Module):
    """A student that answers with given scores (B, classes)."""

    def __init__(self, logits: Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, *_args: Any, **_settings: Any) -> Tensor:
        return self.logits


@torch.no_grad()
def evaluate_own_divergence(stage: Stage, batch: dict, names: list[str], theirs: Tensor) -> tuple[str, str]:
    """Return (what is wrong, what was measured) for terms that replace the divergence (squared errors, cosines, their sum). Whatever their
    formula is, no scores near the teacher's, `theirs` (B, classes), may give less than the teacher's own."""

    def value(logits: Tensor) -> float:
        terms = stage.loss(Answering(logits.float()), batch)
        return sum(float(v) for k, v in terms.items() if k in names)

    terms = ", ".join(names)
    try:
        fault, measured = least_at_teacher(value, theirs)
    except (AttributeError, TypeError, RuntimeError):  # it reads more of the student than its scores
        return "", f"{terms}, not compared (they read more of the student than its scores)"
    return (f"{terms}: {fault}", terms) if fault else ("", f"{terms}, {measured}")


def evaluate_own_labels(stage: Stage, batch: dict, names: list[str], logits: Tensor) -> tuple[str, str]:
    """Return the same for a cross-entropy of another form (smoothed, focal): it must pull each sample with a known label to its class."""
    student, terms = Answering(logits.float().to(batch["label"].device).requires_grad_()), ", ".join(names)
    with torch.enable_grad():
        total = sum(v for k, v in stage.loss(student, batch).items() if k in names)
        slope = torch.autograd.grad(total, student.logits)[0]
    fault = place_weights.astray(
        slope, student.logits.detach(), batch["label"], batch["known"], ("samples", "samples without a known label")
    )
    return (f"{terms}: {fault}" if fault else ""), f"{terms}, which pulls each sample to its class"


def evaluate_own_terms(
    stage: Stage, batch: dict, got: dict, due: dict, forms: dict, scores: tuple[Tensor, Tensor], near: float
) -> tuple[list[str], list[str]]:
    """Return (faults, what was measured) of terms that equal no formula and no known mistake, and remove them from `due`. One term of
    another name is compared with the one that is missing. `scores`: student's and teacher's."""
    missing, own = [k for k in due if k not in got], [k for k in got if k not in due]
    renamed = missing if len(missing) == len(own) == 1 else []
    for term in renamed:
        got[term] = got[own[0]]
    if any(r in k.lower() for k in own for r in REVERSED):
        forms["the reverse divergence"] = due["kl"][1]["teacher and student are exchanged"]
    faults, measured = [], []
    for term in tuple(due):
        soft = term == "kl"
        names = own if term in renamed or (soft and term in missing) else [term]
        right, mistakes = due[term]
        values = torch.tensor(got.get(term, [0.0] * len(right)), dtype=torch.float64, device=right.device)
        known = (right, *mistakes.values(), *(forms.values() if soft else ()))
        if (
            not names
            or any(far(values, v) <= near for v in known)
            or (names == [term] and proportional(values, right, near))
        ):
            continue
        del due[term]
        fault, remark = (
            evaluate_own_divergence(stage, batch, names, scores[1])
            if soft
            else evaluate_own_labels(stage, batch, names, scores[0])
        )
        faults += [fault] * bool(fault)
        measured.append(remark)
    return faults, measured


def other_forms(cfg: Any, logits: Tensor, theirs: Tensor) -> dict[str, Tensor]:
    """Return other published losses of a student and a teacher, (N,) each, from scores (N, classes)."""
    t, w = cfg.temperature, cfg.weight
    log_q, log_p = (logits / t).log_softmax(1), (theirs / t).log_softmax(1)
    middle = ((log_p.exp() + log_q.exp()) / 2).log()
    squares = (logits - theirs).square()
    chosen = -logits.log_softmax(1).gather(1, theirs.argmax(1, keepdim=True))[:, 0]
    return {
        "cross-entropy with the teacher's most likely class": w * chosen,
        "cross-entropy with the teacher": -w * t**2 * (log_p.exp() * log_q).sum(1),  # its gradient is the divergence's
        "Jensen and Shannon's divergence": w * t**2 / 2 * ((log_p.exp() * (log_p - middle)).sum(1) + (log_q.exp() * (log_q - middle)).sum(1)),
        "squared difference of the scores, a sum": w * squares.sum(1),  # Ba & Caruana 2014
        "squared difference of the scores, a mean": w * squares.mean(1),
        "half of the squared difference of the scores": w / 2 * squares.sum(1),
    }  # fmt: skip


def other_share(share: float, n: int, declared: float, rounded: float) -> str:
    """Return the fault if the share of known labels among `n` random samples is not the declared one, else "". `rounded`: what one more known
    label of each class adds to a share."""
    slack = 4 * math.sqrt(declared * (1 - declared) / n) + rounded
    return (
        ""
        if abs(share - declared) <= slack
        else f"{share:.1%} of the training labels are known, {declared:.1%} are declared"
    )


def _stated(cfg: Any, batch: dict, logits: Tensor, theirs: Tensor) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return {term: (its value for each sample (N,), {known mistake: its value})} from scores (N, classes) of student and teacher."""
    t, w = cfg.temperature, cfg.weight
    log_q, log_p = (logits / t).log_softmax(1), (theirs / t).log_softmax(1)

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(1)

    def again(scores: Tensor) -> Tensor:
        return (scores.softmax(1) / t).log_softmax(1)

    def labelled(log_q: Tensor) -> Tensor:
        return -log_q.gather(1, batch["label"][:, None])[:, 0] * batch["known"]

    return {
        "ce": ((1 - w) * labelled(logits.log_softmax(1)),
               {"the scores are softened by the temperature": (1 - w) * labelled(log_q),
                "every label is used, also those that are not known":
                    (1 - w) * -logits.log_softmax(1).gather(1, batch["label"][:, None])[:, 0],
                "the weights of the two terms are exchanged": w * labelled(logits.log_softmax(1))}),
        "kl": (w * t**2 * kl(log_p, log_q),
               {"T^2 is missing": w * kl(log_p, log_q), "divided by T^2": w / t**2 * kl(log_p, log_q),
                "T for T^2": w * t * kl(log_p, log_q),
               "it is a mean over classes, not their sum": w * t**2 * kl(log_p, log_q) / log_p.shape[1],
                "teacher and student are exchanged": w * t**2 * kl(log_q, log_p),
                "the teacher's scores are not softened": w * t**2 * kl(theirs.log_softmax(1), log_q),
                "the student's scores are not softened": w * t**2 * kl(log_p, logits.log_softmax(1)),
                "the teacher's probabilities go through a second softmax, which needs its scores": w * t**2 * kl(again(theirs), log_q),
                "the student's probabilities go through a second softmax, which needs its scores": w * t**2 * kl(log_p, again(logits)),
                "probabilities of both go through a second softmax, which needs scores": w * t**2 * kl(again(theirs), again(logits)),
                "the weights of the two terms are exchanged": (1 - w) * t**2 * kl(log_p, log_q)}),
    }  # fmt: skip


def least_loss(taught: Tensor, label: Tensor, known: Tensor, weight: float, temperature: float) -> float:
    """Return the lowest loss that any scores of these samples reach: a label and a teacher that disagree cannot both be right.
    `taught` (B, N): the teacher's log-probabilities at the temperature; `known` (B,): which labels are known."""
    taught, label, known = taught.detach().cpu().double(), label.cpu(), known.cpu()
    free = (taught * temperature).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([free], max_iter=200, line_search_fn="strong_wolfe")

    def total() -> Tensor:
        kl = (taught.exp() * (taught - (free / temperature).log_softmax(1))).sum(1).mean()
        hard = -free.log_softmax(1)[known, label[known]].sum() / known.sum().clamp_min(1)
        return (1 - weight) * hard + weight * temperature**2 * kl

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = total()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    return total().item()
