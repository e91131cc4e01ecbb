"""The two terms of a loss on words, cross-entropy and divergence, stated a second time, with other published forms and known mistakes.

A term that equals none of them is evaluated by what it does. The divergence must be least at the teacher's scores. The cross-entropy must pull
each scored token to its word. Neither may have a gradient at the prompt or at padding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.gates.causes import place_weights
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.distill.gates.own_divergence import REVERSED, far, least_at_teacher, proportional
from trainworthy.recipes.shared import whisper

SMOOTHINGS = (0.05, 0.1, 0.2)  # published values of label smoothing


@dataclass
class Stated:
    """A term of each recording, in nats per token, weight included."""

    formula: Tensor
    """(B,)"""
    forms: dict[str, Tensor] = field(default_factory=dict)
    """Other published forms."""
    mistakes: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Compared:
    """What a loss has in common with its formulas."""

    wrong: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    formula: dict[str, float] = field(default_factory=dict)
    """{term: nats per token of the batch}."""


def stated(stage: Stage, batch: dict, teacher: whisper.Whisper, cfg: Any) -> dict[str, Stated]:
    """Return both terms, from one recording after the other, without padding and in double precision."""
    student, start = whisper.Whisper(stage.model, teacher.tokenizer, teacher.seconds), len(teacher.prompt)
    each: dict[str, list[Tensor]] = {}
    for mel, ids, n in zip(batch["mel"], batch["ids"], batch["words"].tolist(), strict=True):
        row = ids[None, :n]  # (1, n), no pad
        ours, theirs = (
            to_double(one.logits(one.encode(mel[None]), row)[0, start - 1 : -1]) for one in (student, teacher)
        )
        values = _hard(ours, row[0, start:, None].cpu()) | _soft(ours, theirs, cfg.temperature)
        for name, value in values.items():
            each.setdefault(name, []).append(value.sum() / (n - start))
    rows = {k: torch.stack(v) for k, v in each.items()}
    ce, kl = (
        {k.removeprefix(p): w * v for k, v in rows.items() if k.startswith(p)}
        for p, w in (("ce:", cfg.ce), ("kl:", cfg.kl))
    )
    kl_mistakes = {k.removeprefix("wrong:"): cfg.kl * v for k, v in rows.items() if k.startswith("wrong:")}
    return {"ce": Stated(ce.pop(""), ce), "kl": Stated(kl.pop(""), kl, kl_mistakes)}


def _hard(ours: Tensor, words: Tensor) -> dict[str, Tensor]:
    """Return the cross-entropy of each token (L,) from scores (L, vocabulary) and words (L, 1)."""
    log_q = ours.log_softmax(-1)
    right = -log_q.gather(1, words)[:, 0]
    return {"ce:": right} | {f"ce:label smoothing {e:g}": (1 - e) * right - e * log_q.mean(1) for e in SMOOTHINGS}


def _soft(ours: Tensor, theirs: Tensor, t: float) -> dict[str, Tensor]:
    """Return the divergence of each token (L,) from scores (L, vocabulary), its published forms and its known mistakes."""
    log_q, log_p, sharp_q, sharp_p = (
        (x / s).log_softmax(-1) for x, s in ((ours, t), (theirs, t), (ours, 1), (theirs, 1))
    )
    middle = torch.logaddexp(log_p, log_q) - math.log(2)

    def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    return {
        "kl:": t**2 * kl(log_p, log_q),
        "kl:cross-entropy with the teacher's distribution": -(t**2) * (log_p.exp() * log_q).sum(-1),
        "kl:Jensen and Shannon's divergence": t**2 / 2 * (kl(log_p, middle) + kl(log_q, middle)),
        "wrong:student and teacher are exchanged": t**2 * kl(log_q, log_p),
        "wrong:the teacher's scores are not softened": t**2 * kl(sharp_p, log_q),
        "wrong:the student's scores are not softened": t**2 * kl(log_p, sharp_q),
    }


def compare(
    run: Run,
    stage: Stage,
    batch: dict,
    due: dict[str, Stated],
    found: dict[str, float],
    each: list[dict[str, float]],
    *,
    start: int,
    near: float,
) -> Compared:
    """Compare the terms of a batch, `found`, and of each of its recordings, with the formulas. `start`: tokens of the prompt."""
    out, counts = Compared(), to_double(batch["words"].cpu()) - start
    own = [name for name in found if name not in due]
    missing = [name for name in due if name not in found and due[name].formula.any()]
    if not own:
        own, missing = [], []
    for term, one in due.items():
        names = own if term in missing else [term]
        got = torch.tensor([sum(row.get(k, 0.0) for k in names) for row in each], dtype=torch.float64)
        out.formula[term] = ((one.formula * counts).sum() / counts.sum()).item()
        value, alone = sum(found.get(k, 0.0) for k in names), ((got * counts).sum() / counts.sum()).item()
        plain = f"{term} is {value:.4g} nats per token, by its formula {out.formula[term]:.4g}"
        if abs(alone - value) > near * max(abs(alone), abs(value)):
            out.wrong.append(f"{plain}; of its recordings one by one {alone:.4g}")
            out.causes.append(
                "recordings of a batch change each other's loss, or the term is a mean: return the SUM, core divides it"
            )
            continue
        if far(got, one.formula) <= near:
            out.remarks.append(f"{term} within {far(got, one.formula):.0e} of its formula")
            continue
        mistake = next((k for k, v in one.mistakes.items() if proportional(got, v, near)), "")
        if mistake.endswith("exchanged") and any(r in k.lower() for k in names for r in REVERSED):
            out.remarks.append(f"{', '.join(names)}: the reverse divergence")
            continue
        form = next((k for k, v in one.forms.items() if far(got, v) <= near), "")
        if form:
            out.remarks.append(f"{', '.join(names)}: {form}")
            continue
        if mistake or not got.any() or proportional(got, one.formula, near):
            out.wrong.append(plain)
            out.causes += [f"{term}: {mistake}"] if mistake else []
            continue
        fault, remark = _does(run, stage, batch, names, start, soft=term == "kl")
        out.wrong += [f"{plain}; {fault}"] if fault else []
        out.remarks += [remark] if not fault else []
    return out


def _does(run: Run, stage: Stage, batch: dict, names: list[str], start: int, *, soft: bool) -> tuple[str, str]:
    """Return (what is wrong with loss terms of another form, what was measured)."""
    terms, ids, seen = ", ".join(names), batch["ids"], {}
    own, teacher = stage.model.proj_out, stage.frozen_modules["teacher"].proj_out

    def total() -> Tensor:
        with run.autocast():
            loss = stage.loss(stage.model, batch)
        return sum(loss[k] for k in names)

    def keep(name: str) -> Callable:
        return lambda _module, _args, out: seen.update({name: out.detach().float()})

    def of(scores: Tensor) -> float:
        with own.register_forward_hook(lambda *_: scores):
            return total().item()

    with evaluating(stage.model):
        slope = place_weights.slopes(own, total)
        with own.register_forward_hook(keep("ours")), teacher.register_forward_hook(keep("theirs")):
            total()
        shape = seen["theirs"].shape if "theirs" in seen else None
        if slope is None or slope.shape != shape or shape[1] != ids.shape[1] - 1:
            return "", f"{terms}: not compared (read from more than the scores of each token)"
        place = torch.arange(1, ids.shape[1], device=ids.device)
        scored = (place >= start) & (place < batch["words"][:, None])
        if not soft:
            fault = place_weights.astray(slope, seen["ours"], ids[:, 1:], scored, ("tokens", "the prompt or pads"))
            return fault, f"{terms}: a form of the recipe's own, which pulls each token to its word"
        size = slope.abs().amax(-1)
        if (size[~scored] > place_weights.ASCENT * size.max()).any():
            return "the prompt or pads change it", ""
        if (size[scored] == 0).float().mean() > 0.5:
            return "most tokens have no gradient", ""
        fault, measured = least_at_teacher(of, seen["theirs"])
        return fault, f"{terms}: a form of the recipe's own, {measured}"
