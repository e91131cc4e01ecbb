"""A short run of train(), and what the net got in it: several gates read it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.diffusion.gates.objective import condition_field

SHORT = 60  # training steps after which a net denoises a little


@dataclass
class Seen:
    """The net's inputs in a few steps of train()."""

    timesteps: Tensor = field(default_factory=lambda: torch.zeros(0))
    hidden: list[bool] = field(default_factory=list)
    """For each sample: does the net get another class than the sample's?"""
    null: set[int] = field(default_factory=set)
    """The values that it gets instead."""
    distinct: float = 1.0
    """Number of different timesteps in a batch over its size, at the worst step."""


def watched(context: GateContext) -> Seen:
    """Return the net's inputs in a short run of train()."""
    return trained(context)[2]


def trained(context: GateContext) -> tuple[Run, Stage, Seen]:
    """Run train() for SHORT steps; return (run, stage, the net's inputs)."""

    def rehearse() -> tuple[Run, Stage, Seen]:
        run, stage = context.build(Rehearsal(steps=SHORT, batch_size=max(32, context.accelerator.num_processes)))
        own, seen, key = stage.loss, Seen(), condition_field(stage.data["train"])[0]

        def loss(model: nn.Module, batch: dict) -> dict[str, Tensor]:
            def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
                t = kwargs.get("timestep", args[1] if len(args) > 1 else None)
                given = kwargs.get("class_labels", args[2] if len(args) > 2 else None)
                t = torch.as_tensor(t).expand(len(batch[key])).cpu()
                seen.timesteps = torch.cat([seen.timesteps, t.float()])
                if len(t) >= 8:
                    seen.distinct = min(seen.distinct, len(t.unique()) / len(t))
                if given is not None:
                    other = (given != batch[key]).tolist()
                    seen.hidden += other
                    seen.null |= {c for c, o in zip(given.tolist(), other, strict=True) if o}

            with stage.model.register_forward_pre_hook(note, with_kwargs=True):
                return own(model, batch)

        stage.loss = loss
        context.train(context.cfg, run, stage)
        stage.loss = own
        return run, stage, seen

    return context.once("diffusion short run", rehearse)
