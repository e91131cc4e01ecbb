"""The gate `ema`: the EMA that is sampled and exported follows the weights at its declared decay (DF2)."""

import tempfile
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.checks.stored_weights import REMEMBERED, SMALL, UPDATES, between, copied, flat, remembered
from trainworthy.core.gates.gate import GateContext, pick, release, unshare
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage, View

STEPS, LONGER = 6, 60  # of train(); the longer one if the decay is set in the loop


def _raw(context: GateContext, run: Run, stage: Stage) -> Finding:
    """Without an EMA: the export after six steps of train() must be the trained net."""
    context.train(context.cfg, run, stage)
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
        shipped = flat(DiffusionPipeline.from_pretrained(name, trust_remote_code=True).unet)
    own = flat(getattr(stage.eval_model, "unet", stage.eval_model))
    if [len(p) for p in own] != [len(p) for p in shipped]:
        raise Skip("no EMA (--ema 0), and the export has other tensors: adapters were merged")
    differs = _difference(own, shipped)
    return Finding(
        differs <= 1e-6, f"no EMA (--ema 0); exported weights differ from the trained ones by at most {differs:.2g}",
        "at most 1e-6", "export() writes another net: a newly built one, or a copy from before training",
        evidence={"exported_differs": differs},
    )  # fmt: skip


def _rehearsal(context: GateContext, steps: int) -> tuple[Run, Stage]:
    return context.build(Rehearsal(steps=steps, batch_size=max(8, context.accelerator.num_processes), peak=True))


def _followed(context: GateContext, run: Run, stage: Stage) -> tuple[list[float], float, list[Tensor]]:
    """Train; return the decay of each update, the largest share of an average that is neither the old one nor the weights, and the last
    average."""
    decays, beside, before = [], [0.0], copied(stage.ema_model)

    def watch(stage: Stage, _step: int) -> bool:
        decay, error = between(before, flat(stage.model), flat(stage.ema_model))
        decays.append(decay)
        beside.append(error)
        before[:] = copied(stage.ema_model)
        return False

    run.rehearsal.watch = watch
    context.train(context.cfg, run, stage)
    return decays, max(beside), before


def _least(ema: float, updates: int) -> float:
    """Return the lowest decay after so many updates: the average is over 1/15 of them, or over as many as --ema allows."""
    return max(0.0, 1 - max(1 - ema, REMEMBERED / updates))


def _difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest difference between the entries of two models."""
    return max((x.cpu().double() - y.cpu().double()).abs().max().item() for x, y in zip(a, b, strict=True) if len(x))


@gate(
    "ema",
    rows="DF2",
    title="samples and export use an EMA of the weights with the declared decay",
    reads="model evaluate optimizers ema_model state export train",
)
def ema(context: GateContext) -> Finding:
    """Measures the EMA's decay at each of six steps of train(); a ramp must advance. Then it makes as many updates as the run will (at
    most 2,000): by then the EMA must average over 1/15 of the run, or over as much as --ema allows. Finally it changes the raw weights:
    evaluation and export must not change."""
    cfg = context.cfg
    run, stage = _rehearsal(context, STEPS)
    if stage.ema_model is None:
        return _raw(context, run, stage)
    decays, off, before = _followed(context, run, stage)
    release(stage)
    size = sum(map(len, before))
    view = View(stage.data["val"], pick(stage.data["val"], 16, cfg.run.seed))
    first = run.measure(stage, view)
    unshare(stage.model)
    with torch.no_grad():
        for p in stage.model.parameters():
            p.add_(1.0)
    moved = [k for k, v in run.measure(stage, view).items() if v != first[k] and v == v]
    with tempfile.TemporaryDirectory() as name:
        stage.export(Path(name))
        shipped = flat(DiffusionPipeline.from_pretrained(name, trust_remote_code=True).unet)
    differs = _difference(before, shipped)
    wrong = []
    if any(d >= 1 for d in decays) or off > 1e-2:
        late = next((i + 1 for i, d in enumerate(decays) if d >= 1), None)
        wrong.append(
            f"the average is not updated at step {late}"
            if late
            else "the new average is not between the old one and the weights"
        )
    elif not all(0 <= d <= cfg.ema + 1e-3 for d in decays):
        wrong.append("the decay is not the one of --ema")
    elif decays[0] < cfg.ema - 1e-3 and decays[-1] <= decays[0] + 1e-3:
        wrong.append(
            f"the decay stays at {decays[-1]:.2f}: its ramp does not advance, so the average is almost the newest weights"
        )
    updates = max(6, min(Run(cfg, context.accelerator).total_steps(stage), UPDATES if size < SMALL else UPDATES // 20))
    late, due = remembered(stage, updates)[0], _least(cfg.ema, updates)
    advanced = decays[-1] > decays[0] + 1e-3
    if (
        late is not None and late < due and advanced and late <= decays[-1] + 1e-2
    ):  # the loop sets the decay, not the average
        updates, due = LONGER, _least(cfg.ema, LONGER)
        late = _followed(context, *_rehearsal(context, LONGER))[0][-1]
    if late is not None and not wrong and late < due - 1e-3:
        wrong.append(
            f"after {updates:,} updates, {'as many as the run makes, ' * (updates != LONGER)}the decay is {late:.4f}, below {due:.4f}"
        )
    if moved:
        wrong.append(f"the evaluation uses the raw weights ({moved[0]} changed with them)")
    if differs > 1e-6:
        wrong.append(f"the exported weights are not the average (largest difference {differs:.2g})")
    lag = f"decays {' '.join(f'{d:.2f}' for d in decays)} over six steps"
    lag += "" if late is None else f", {late:.4f} after {updates:,} updates"
    return Finding(
        not wrong, f"{'; '.join(wrong)}; {lag}" if wrong else f"{lag}; evaluation and export use the average",
        f"each average between the last one and the weights, with a decay of at most {cfg.ema:g}, at the end of the ramp at least "
        f"{due:.4f}; the average is evaluated and exported",
        order_causes(
            (any("not updated" in w or "between the old" in w for w in wrong), "the EMA update is missing in train(), or comes before the "
             "optimiser's step"),
            (any("decay" in w for w in wrong), "the decay's ramp restarts at every update, or stops below --ema: the counter of updates "
             "is lost or reset"),
            (bool(moved) or differs > 1e-6, "evaluate() or export() uses the model instead of the average")),
        evidence={"decays": decays, "off": off, "exported_differs": differs, "late": late, "updates": updates},
    )  # fmt: skip
