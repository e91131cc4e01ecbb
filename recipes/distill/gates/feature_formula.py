"""The loss on a teacher's features, stated a second time: nothing here is shared with the recipe's `loss`."""

import torch
from torch import Tensor
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.checks.formula import Statement, Statements
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.recipe.stage import Stage


def features(context: GateContext, stage: Stage, batch: dict) -> Statements:
    """Of each frame inside a recording: mean squared difference of the features, and one minus the cosine of their angle; sums over
    a recording, times their weights."""
    cfg, ours, theirs = context.cfg, stage.model(batch["envelope"]).float(), batch["features"].float()
    frames = torch.arange(theirs.shape[1], device=theirs.device)[None]
    heard = (frames < batch["span"][:, None]).float()  # (B, frames)
    gap = ((ours - theirs) ** 2).sum(-1) / theirs.shape[-1]
    angle = (ours * theirs).sum(-1) / (ours.norm(dim=-1) * theirs.norm(dim=-1)).clamp_min(1e-8)

    def recording(each: Tensor) -> Tensor:
        return (each * heard).sum(1)

    return {
        "mse": Statement(
            {"mean squared difference": cfg.mse * recording(gap)},
            {"frames after the recording's end count": cfg.mse * gap.sum(1),
             "a sum over the features, not a mean": cfg.mse * recording(gap) * theirs.shape[-1],
             "a mean over the frames of a recording": cfg.mse * recording(gap) / heard.sum(1).clamp_min(1)},
            optional=not cfg.mse,
        ),
        "cosine": Statement(
            {"one minus the cosine": cfg.cosine * recording(1 - angle)},
            {"the cosine itself: features turn away from the teacher's": cfg.cosine * recording(angle),
             "frames after the recording's end count": cfg.cosine * (1 - angle).sum(1)},
            optional=not cfg.cosine,
        ),
    }  # fmt: skip


FEATURES = formula.gate_of(
    features, rows="W2",
    causes="the features of another recording or of other frames\na term is not masked, or averaged where it is summed",
)  # fmt: skip
