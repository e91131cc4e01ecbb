"""Records what RLHF's own loop does, for its gates."""

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.rl.language.models.policy import Writer


@dataclass
class Iteration:
    """A recording of one iteration of the recipe's own `train()`: a rollout and the first pass over it."""

    kl_coef: float
    """The KL coefficient at the start of the iteration."""
    model: Writer
    """A copy of the model at the start of the iteration."""
    batches: list[dict] = field(default_factory=list)
    """The batches of the first pass, just before the loss."""
    kl: float = math.nan
    """The KL that the controller received."""


def made(context: GateContext) -> tuple[Run, Stage, list[Iteration]]:
    """Record two iterations of the recipe's own `train()`. In the second one the policy differs from the reference. The value head starts
    with random weights here, because values of zero would hide errors in their use."""

    def make() -> tuple[Run, Stage, list[Iteration]]:
        run, stage = context.build(Rehearsal(steps=2, peak=True))
        torch.nn.init.normal_(stage.model.head[-1].weight, std=0.1)
        loss, own_update, found = stage.loss, stage.state["controller"].update, {}
        share = context.cfg.rollout_batch_size // run.world

        def listen(model: Writer, batch: dict) -> dict[str, Tensor]:
            if torch.is_grad_enabled():
                now = found.setdefault(run.step, Iteration(stage.state["controller"].value, copy.deepcopy(model)))
                if sum(len(b["response"]) for b in now.batches) < share:
                    now.batches.append({k: v.clone() for k, v in batch.items()})
            return loss(model, batch)

        def update(kl: float) -> None:
            found[run.step].kl = kl
            own_update(kl)

        stage.loss, stage.state["controller"].update = listen, update
        context.train(context.cfg, run, stage)
        stage.loss = loss
        return run, stage, [found[k] for k in sorted(found)]

    return context.once("rlhf-made", make)
