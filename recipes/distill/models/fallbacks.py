"""Fallback stages of distillation into a frozen head (W7). If the features are close to the teacher's and the words stay wrong, the decoder
is trained on the student: first its cross-attention at the student's learning rate, then all of it at a tenth of that.
"""

import copy
from dataclasses import replace

from trainworthy.core.session.stages import Maker
from trainworthy.recipes.distill.gates import whisper
from trainworthy.recipes.distill.models.heads import Opened

from trainworthy import core


def cross_attention(task: Maker) -> Maker:
    """Return the fallback stage that continues `task` with the decoder's cross-attention trainable."""

    def cross_attention(cfg: core.Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
        stage = opened(task(cfg, run, widened(previous)), cfg, ".encoder_attn.", rate=1.0)
        return replace(stage, name="cross_attention", monitors=[whisper.repetition, whisper.ladder("head")])

    return cross_attention


def head(task: Maker) -> Maker:
    """Return the fallback stage with the whole decoder trainable, at a tenth of the student's learning rate."""

    def head(cfg: core.Config, run: core.Run, previous: core.Stage | None = None) -> core.Stage:
        stage = opened(task(cfg, run, widened(previous)), cfg, ".decoder.", rate=0.1)
        return replace(stage, name="head", monitors=[whisper.repetition])

    return head


def widened(previous: core.Stage) -> core.Stage:
    """Return the stage to continue, whose student gets a Whisper of its own: a copy of the teacher, or the one trained so far."""
    model = previous.eval_model
    if "teacher" not in previous.frozen_modules:
        raise core.UserError("no decoder to open", got="--decoder ctc", needed="--decoder whisper")
    if not isinstance(model, Opened):
        model = Opened(model, copy.deepcopy(previous.frozen_modules["teacher"]))
    return replace(previous, model=model, ema_model=None)


def opened(stage: core.Stage, cfg: core.Config, opens: str, *, rate: float) -> core.Stage:
    """Return `stage` with the Whisper parameters whose names contain `opens` trainable, at that share of the student's rate."""
    model = stage.model
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("student.") or opens in name)
    rates = {"student": cfg.optim.lr, "head": rate * cfg.optim.lr}
    return replace(
        stage,
        optimizers={"main": core.make_optimizer(model, cfg.optim, rates)},
        expect=replace(stage.expect, frozen=tuple(n for n, p in model.named_parameters() if not p.requires_grad)),
    )
