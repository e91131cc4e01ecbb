"""The loss on a teacher's features, stated a second time: nothing here is shared with the recipe's `loss`."""

import torch
from torch import Tensor
from trainworthy.core.gates.checks import formula
from trainworthy.core.gates.checks.formula import Statement, Statements
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.recipe.stage import Stage

AWAY = 0.02  # share of the frames that a robust error may leave where they are, or a little beyond
NOTHING = 1e-3  # of the largest gradient


def features(context: GateContext, stage: Stage, batch: dict) -> Statements:
    """Of each frame inside a recording: mean squared difference of the features, and one minus the cosine of their angle; sums over
    a recording, times their weights. Another form of a term (Huber's, the absolute error) passes if it draws every frame to the teacher's."""
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
            own=lambda: _draws(stage, batch, heard > 0, "mse"), setting="mse",
        ),
        "cosine": Statement(
            {"one minus the cosine": cfg.cosine * recording(1 - angle)},
            {"the cosine itself: features turn away from the teacher's": cfg.cosine * recording(angle),
             "frames after the recording's end count": cfg.cosine * (1 - angle).sum(1)},
            optional=not cfg.cosine,
            own=lambda: _draws(stage, batch, heard > 0, "cosine"), setting="cosine",
        ),
    }  # fmt: skip


def _draws(stage: Stage, batch: dict, heard: Tensor, term: str) -> str:
    """Return what is wrong if a loss term is not least at the teacher's features, or does not draw frames inside a recording there; else ""."""
    theirs = batch["features"].float()
    with torch.no_grad():
        ours = stage.model(batch["envelope"]).float()
    slope, rest = (_slope(stage, batch, term, canvas) for canvas in (ours, theirs))
    size = slope.abs().amax(-1)  # (B, frames)
    if (size[~heard] > NOTHING * size.max()).any():
        return "frames after the recording's end change the loss"
    if rest.abs().max() > NOTHING * size.max():
        return "the loss is not least at the teacher's features: other frames, another recording, another scale"
    along = (slope * (ours - theirs)).sum(-1)[heard]
    away = int((along < -NOTHING * along.abs().max()).sum())
    if away > AWAY * len(along):
        return f"{away} of {len(along)} frames are driven away from the teacher's features"
    return "most frames have no gradient" if 2 * int((size[heard] == 0).sum()) > len(along) else ""


def _slope(stage: Stage, batch: dict, term: str, canvas: Tensor) -> Tensor:
    """Return the gradient of a loss term with respect to the student's features (B, frames, width), where they are `canvas`."""
    leaf = canvas.clone().requires_grad_()
    with stage.model.register_forward_hook(lambda *_: leaf), torch.enable_grad():
        total = formula.term_of(stage.loss(stage.model, batch), term, ("mse", "cosine"))
        found = torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
    return torch.zeros_like(canvas) if found is None else found


FEATURES = formula.gate_of(
    features, rows="W2",
    causes="the features of another recording or of other frames\na term is not masked, or averaged where it is summed",
)  # fmt: skip
