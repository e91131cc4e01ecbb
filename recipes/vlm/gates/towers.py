"""Gates on the parts of a vision-language model: which of them train in a stage (X1), and at what rate (X3)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from trainworthy.core.base.modes import hooked
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import Gate, GateContext, micro_batch_sizes
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage

TOWERS = ("encoder", "projector", "language")
STEPS, BATCH = 3, 16
# relative change of a tower's weights in one step: more destroys what it has learnt, less is no learning
FASTEST, SLOWEST = 0.05, 1e-6


@dataclass
class Watched:
    """Records a few steps of the recipe's own `train()` at the peak rate, per tower."""

    run: Run
    stage: Stage
    share: dict[str, list[float]] = field(default_factory=dict)
    """For each tower and step, |change of the weights| / |initial weights|, frozen weights included. A tower whose weights are all 0 has
    none."""
    training: list[bool] = field(default_factory=list)
    """Whether any module of the encoder was in train mode in a training forward pass."""


def watched(context: GateContext) -> Watched:
    """Rehearse once for several gates."""

    def rehearse() -> Watched:
        size = max(BATCH, 4 * context.accelerator.num_processes)
        run, stage = context.build(
            Rehearsal(steps=STEPS, batch_size=size, sizes=micro_batch_sizes(context, size), peak=True)
        )
        found, mine = Watched(run, stage), {t: _of(stage.parameters(), t) for t in TOWERS}
        before = {t: _flat(ps) for t, ps in mine.items() if ps}
        every = dict(stage.model.named_parameters())
        # adapters are small; the weights that they are added to are not
        size = {t: _flat(_of(every, t)).norm() for t in before}
        # Qwen's projector is inside the encoder module but does not belong to it; modules without weights there share the mode of both.
        projector, encoder = {*stage.model.projector.modules()}, [*stage.model.encoder.modules()]
        if not projector.isdisjoint(encoder):
            encoder = [m for m in encoder if projector.isdisjoint(m.modules()) and [*m.parameters()]]

        def look(*_) -> None:
            if torch.is_grad_enabled():
                found.training.append(any(m.training for m in encoder))

        def compare(*_) -> None:
            for tower, old in before.items():
                new = _flat(mine[tower])
                if size[tower] > 0:
                    found.share.setdefault(tower, []).append(((new - old).norm() / size[tower]).item())
                before[tower] = new

        hooks = [stage.model.encoder.register_forward_pre_hook(look)]
        hooks += [o.register_step_post_hook(compare) for o in stage.optimizers.values()]
        with hooked(hooks):
            context.train(context.cfg, run, stage)
        return found

    return context.once("vlm towers", rehearse)


def _of(parameters: dict[str, nn.Parameter], tower: str) -> list[nn.Parameter]:
    return [p for n, p in parameters.items() if n.split(".")[0] == tower]


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in parameters]).clone()


def towers_gate(learn: tuple[str, ...]) -> Gate:
    """Checks that exactly the stage's towers train."""

    @gate("towers", rows="X1", title="only the parts that this stage trains learn", reads="model optimizers train")
    def towers(context: GateContext) -> Finding:
        found = watched(context)
        counts = {t: (sum(p.numel() for p in _of(found.stage.parameters(), t)),
                      sum(p.numel() for p in _of(dict(found.stage.model.named_parameters()), t))) for t in TOWERS}  # fmt: skip
        wrong = [f"the {t} trains {n:,} of its {total:,} parameters and should be frozen" for t, (n, total) in counts.items()
                 if n and t not in learn]  # fmt: skip
        wrong += [
            f"the {t} should learn, but none of its {counts[t][1]:,} parameters trains"
            for t in learn
            if not counts[t][0]
        ]
        if 0 < counts["projector"][0] < counts["projector"][1]:
            wrong.append("a part of the projector is frozen: {} of {} parameters train".format(*counts["projector"]))
        if any(found.training) and "encoder" not in learn:
            wrong.append("the frozen encoder is not in eval mode: its dropout is active, its running statistics change")
        measured = ", ".join(f"{t} {n:,} of {total:,}" for t, (n, total) in counts.items())
        return Finding(
            not wrong, "; ".join([*wrong, measured] if wrong else [measured]),
            f"{' and '.join(learn)} {'learn' if len(learn) > 1 else 'learns'}, everything else frozen and in eval mode",
            "requires_grad is set on the parent of several towers, or by a list of names that misses one\n"
            "the optimiser was built before the towers were frozen\nmodel.train() on the whole model in the loop",
            evidence={"trained": {t: n for t, (n, _) in counts.items()}},
        )  # fmt: skip

    return towers


@gate(
    "rates",
    rows="X3",
    title="each part has its own learning rate, none too high",
    reads="model optimizers expect train",
)
def rates(context: GateContext) -> Finding:
    """Reads the optimiser's groups, and how far a step at the peak rate moves each tower's weights."""
    found = watched(context)
    names = {id(p): n.split(".")[0] for n, p in found.stage.model.named_parameters()}
    groups = [g for o in found.stage.optimizers.values() for g in o.param_groups if g["params"]]
    table = [(names[id(g["params"][0])], g.get("name", ""), float(g.get("peak_lr", g["lr"])), sum(p.numel() for p in g["params"]))
             for g in groups]  # fmt: skip
    mixed = [g.get("name", "") for g in groups if len({names[id(p)] for p in g["params"]}) > 1]
    share = {t: max(moved) for t, moved in found.share.items()}
    wrong = [f"group '{name}' holds several towers" for name in mixed]
    peaks = {t: {rate for tower, _, rate, _ in table if tower == t} for t in share}
    # LLaVA trains projector and language model at one rate in its second stage: the language model's
    declared = getattr(context.cfg, "language_lr", 0.0) * (1 + 1e-6)
    if len(share) > 1 and len(one := set().union(*peaks.values())) == 1 and max(one) > declared:
        wrong.append(f"one rate, {table[0][2]:g}, for {' and '.join(share)}, although only one of them is pretrained")
    wrong += [f"a step moves the {t} by {s:.1%} of its weights" for t, s in share.items() if s > FASTEST]
    wrong += [f"a step moves the {t} by only {s:.1e} of its weights" for t, s in share.items() if s < SLOWEST]
    measured = ", ".join(f"{name} {rate:g} ({n:,})" for _, name, rate, n in table)
    zero = sorted({tower for tower, *_ in table} - {*share})
    measured += (
        "; a step moves " + ", ".join(f"{t} {s:.2%}" for t, s in share.items()) + " of its weights" if share else ""
    )
    measured += f"; {' and '.join(zero)} starts at 0" if zero else ""
    return Finding(
        not wrong, "; ".join([*wrong, measured] if wrong else [measured]),
        f"one rate for each tower that trains, or that of --language-lr for all; no step moves a tower by more than {FASTEST:.0%} of its weights",
        "all towers are in one optimiser group\na new projector's rate is used on a pretrained language model\n"
        "a rate for LoRA adapters is used on full weights",
        evidence={"groups": [{"tower": t, "group": n, "peak_lr": r, "parameters": k} for t, n, r, k in table], "moved": share},
    )  # fmt: skip
