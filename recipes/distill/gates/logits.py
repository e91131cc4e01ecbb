"""What must be proved of a teacher that answers with logits: it sees pictures as it was trained to, and says the same twice."""

import torch
from torch import Tensor
from trainworthy.core.base import seeds
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, Proof, fetch, pick
from trainworthy.core.gates.learning import overfitted
from trainworthy.core.loop.run import evaluating
from trainworthy.recipes.shared.judge import Judge

SAMPLES = 250
LOST = 0.03  # of its accuracy that augmentation may cost a teacher
MOVED = 1e-5  # relative: what rounding may do to one loss computed twice


def teacher(judge: Judge) -> Gate:
    """The gate on `judge` as the loss asks it."""

    title = "the teacher is as accurate inside the loss as alone, and repeatable"

    @gate("teacher", rows="V1 C12", title=title, reads="data loss")
    def prove(proof: Proof) -> Finding:
        """What its head answers while the loss of held-out pictures is computed, against the labels; and that loss twice under
        different draws, the student in eval mode."""
        run, stage, _ = overfitted(proof)
        val, asked = stage.data["val"], []
        batch = fetch(val, pick(val, min(SAMPLES, len(val)), proof.cfg.run.seed), None, run.device)
        hook = judge.head.register_forward_hook(lambda _module, _args, out: asked.append(out.detach()))
        losses: list[Tensor] = []
        try:
            with evaluating(stage.model):
                for draws in range(2):
                    seeds.seed_global(draws)
                    losses.append(sum(stage.loss(stage.model, batch).values()))
        finally:
            hook.remove()
        if not asked:
            return Finding(
                False, "the loss never asks the teacher", "an answer for every sample", "targets from elsewhere"
            )
        right = (asked[0].argmax(1) == batch["label"]).double().mean().item()
        by_itself = (judge.logits(batch["image"] * 2 - 1).argmax(1) == batch["label"]).double().mean().item()
        wavers = ((losses[0] - losses[1]).abs() / losses[0].abs().clamp_min(1e-8)).item()
        return Finding(
            right >= by_itself - LOST and wavers <= MOVED,
            f"right on {right:.1%} through the loss, {by_itself:.1%} by itself; the loss of one batch twice: {wavers:.0e} apart",
            f"at most {LOST:.0%} less, and {MOVED:g}",
            "the teacher gets the student's normalisation, scale or size: each net has its own\n"
            "the teacher is in train mode, or dropout stands behind it\n"
            "another picture is shown to the teacher than to the student",
            batch={k: v for k, v in batch.items() if isinstance(v, torch.Tensor)},
        )  # fmt: skip

    return prove
