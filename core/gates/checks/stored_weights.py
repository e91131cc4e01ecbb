"""Checks what a stage stores in addition to its trained weights. References, target networks and kept weights must have
memory of their own, and the average of the weights must follow them as its decay says."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, release, unshare
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.optim import exact
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.recipe.stage import Stage

STEPS, LONGER = 4, 64  # rehearsed steps; and how many more an average may wait for its first update
REMEMBERED = 15  # an average must remember a fifteenth of its updates; (1 + n) / (10 + n) remembers a ninth
LEAST = 0.5  # decay below which an average is more than half the newest weights
INITIAL = 0.1  # the most that may be left of the untrained weights at the end of the run
UPDATES, SMALL = 2000, 5_000_000  # updates of an average that are made; a twentieth of a net with more parameters
EXACT = 1e-2  # distance from the line between average and weights, relative to the gap between them


# --------------------------------------------------------------------------------------------------------------- storage
@gate(
    "storage",
    rows="C12 C13",
    title="averages, references, targets and kept weights share no memory with the weights that train",
    reads="model optimizers ema_model state frozen_modules train",
)
def storage(context: GateContext) -> Finding:
    """Compare the memory of trained parameters, after a rehearsal of `train()`, with that of `ema_model`,
    `frozen_modules` and `state`. Weights that `train()` loads back must not be the model's own memory either: a
    `state_dict()` without a copy follows the model, so the best weights become the last ones."""
    _, stage, record = rehearsed(context)
    wrong = [f"{what} shares memory with the weights that train: {names}" for what, names in record.shared.items()]
    wrong += [
        f"train() loads weights into the model that are the model's own memory (first: {name})"
        for name in record.loaded_itself[:1]
    ]
    kept = [*stage.frozen_modules, *stage.state] or ([] if stage.ema_model is None else ["ema_model"])
    return Finding(
        not wrong, "; ".join(wrong) or (f"{', '.join(kept)}: no memory shared with a trained weight" if kept else "the stage keeps no other weights"),
        "every copy has its own memory",
        "copied without deepcopy() or clone(): `kept = model`, `model.state_dict()`, `p.data`, `copy.copy(model)`. Such a copy follows "
        "every update: the reference equals the policy, the average the newest weights, the best weights the last ones\n"
        "use copy.deepcopy(model), or {k: v.clone() for k, v in model.state_dict().items()}",
        evidence={"kept": kept, "loaded_itself": record.loaded_itself[:20]},
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- average
@gate(
    "ema",
    rows="C12",
    title="the average of the weights is updated, over a suitable number of steps",
    reads="model optimizers ema_model state train",
)
def ema(context: GateContext) -> Finding:
    """Weights and average after each of four rehearsed steps: the average must lie between its last value and the
    weights. Then the object that keeps it is updated as often as the whole run will (at most 2,000 times): by the end
    it must remember a fifteenth of the updates, or as much as the decay that its keeper declares, and hardly anything of
    the untrained weights."""
    total = Run(context.cfg, context.accelerator).total_steps(context.peek())
    stage, steps, decays, off = _watched(context, STEPS)
    if steps and not decays and total > STEPS and not stage.expect.gate_batch_size:
        del stage  # before the next one is built
        stage, steps, decays, off = _watched(context, min(total, LONGER))
    each = steps / max(1, len(decays))  # steps between two updates
    size = sum(p.numel() for p in stage.ema_model.parameters())
    updates = max(STEPS, min(round(total / each), UPDATES if size < SMALL else UPDATES // 20))
    whole = max(1.0, total / each / updates)
    late, left = (None, None) if not decays else remembered(stage, updates)
    left = None if left is None else left * math.prod(max(0.0, d) for d in decays)
    if late is not None and len(decays) > 1 and 0 < max(decays) < min(decays) + 1e-3:
        late = min(late, decays[-1])  # train() keeps its ramp from advancing
    declared = getattr(_keeper(stage), "decay", None)
    # Without a declared decay any may be meant
    declared = float(declared) if isinstance(declared, float | int) else LEAST
    wrong, due = [], max(LEAST, min(declared, 1 - REMEMBERED / updates))
    if not decays:
        wrong.append(f"the average does not move in {steps} steps")
    elif off > EXACT or not all(-1e-3 <= d < 1 for d in decays):
        wrong.append(f"the average does not lie between its last value and the weights (decays {_shorten(decays)})")
    elif late is not None and late < due - 1e-3:
        wrong.append(
            f"after {updates:,} updates, as many as the run makes, its decay is {late:.4f}: the average is nearly the newest weights"
        )
    elif left is not None and left**whole > INITIAL:
        wrong.append(
            f"after the run's {round(total / each):,} updates, {left**whole:.0%} of the average are still the untrained weights"
        )
    measured = f"decays {_shorten(decays)} over {steps} steps"
    if late is not None:
        measured += f", {late:.4f} after {updates:,} updates, {left**whole:.1%} of the untrained weights left"
    return Finding(
        not wrong, f"{'; '.join(wrong)}; {measured}" if wrong else measured,
        f"updated in train(), a decay of at least {due:.4f} at the end, at most {INITIAL:.0%} of the untrained weights left",
        "the update is missing in train(), or reads the average instead of the model\n"
        "the decay was chosen for a run of another length: 1 - 10 / steps is a good start\n"
        "the warm-up of the decay restarts at every update: the counter of updates is lost or reset\n"
        "the decay and its complement are exchanged (0.001 for 0.999)",
        evidence={"decays": decays, "off": off, "late": late, "left": left, "updates": updates},
    )  # fmt: skip


def _watched(context: GateContext, steps: int) -> tuple[Stage, int, list[float], float]:
    """Run `train()` for a few steps; return (stage, steps made, decay of each update of the average, largest distance of the
    average from the line between its last value and the weights)."""
    before: list[Tensor] = []
    changed: list[int] = []  # steps with an update
    made, decays, off = [0], [], [0.0]

    def watch(stage: Stage, step: int) -> bool:
        made[0], now = step, flat(stage.ema_model)
        if not all(torch.equal(a, b.cpu()) for a, b in zip(before, now, strict=True)):
            decay, beside = between(before, flat(stage.model), now)
            decays.append(decay)
            off.append(beside)
            changed.append(step)
            before[:] = copied(stage.ema_model)
        return step > STEPS and any(s > 1 for s in changed)

    size = max(context.expect.at_most(8), 2 * context.accelerator.num_processes)
    run, stage = context.build(Rehearsal(steps=steps, batch_size=size, peak=True, watch=watch))
    if [len(p) for p in flat(stage.model)] != [len(p) for p in flat(stage.ema_model)]:
        raise Skip("the average has other parameters than the model")
    before[:] = copied(stage.ema_model)
    context.train(context.cfg, run, stage)
    release(stage)
    return stage, made[0], decays, max(off)


def flat(net: nn.Module) -> list[Tensor]:
    """Each parameter in one row."""
    return [p.detach().flatten() for p in net.parameters()]


def copied(net: nn.Module) -> list[Tensor]:
    """A copy of each parameter in one row, on the host."""
    return [p.to("cpu", copy=True) for p in flat(net)]


def between(before: list[Tensor], raw: list[Tensor], now: list[Tensor]) -> tuple[float, float]:
    """(the decay that leads from one average to the next, distance from the line between average and weights)."""

    def gaps() -> Iterator[tuple[Tensor, Tensor]]:
        for old, weights, new in zip(before, raw, now, strict=True):
            base = exact(weights)
            yield exact(old.to(weights.device)) - base, exact(new) - base

    along = sum((moved @ gap).item() for gap, moved in gaps())
    length = sum((gap @ gap).item() for gap, _ in gaps())
    decay = along / max(length, 1e-30)
    beside = sum((moved - decay * gap).square().sum().item() for gap, moved in gaps())
    return decay, beside**0.5 / max(length**0.5, 1e-30)


def _keeper(stage: Stage) -> Any:
    """Return the object in `stage.state` that keeps the average; None if there is none."""
    holds = (o for o in stage.state.values() if getattr(o, "model", None) is stage.ema_model and hasattr(o, "update"))
    return next(holds, None)


def remembered(stage: Stage, updates: int) -> tuple[float | None, float | None]:
    """Update the average `updates` times; return (decay of the last update, fraction of the initial weights that is left). None
    for both if no object in `stage.state` keeps the average."""
    keeper = _keeper(stage)
    if keeper is None:
        return None, None
    # Parameter 0 of the model moves each time, so that the last decay can be read; the others stay, so that what is
    # left of the first average shows how much it forgot. The keeper is as new: its counter begins at its first update.
    pairs = [(a, b) for a, b in zip(stage.ema_model.parameters(), stage.model.parameters(), strict=True)
             if b.is_floating_point() and b.numel()]  # fmt: skip
    unshare(stage.model)
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.copy_(theirs + 1)
        some = pairs[0][1]
        before: list[Tensor] = []
        for i in range(updates):
            some.add_((-1.0) ** i)
            if i == updates - 1:
                before = copied(stage.ema_model)
            keeper.update(stage.model)
        late = between(before, flat(stage.model), flat(stage.ema_model))[0]
        rest = [(mine - theirs).mean().item() for mine, theirs in pairs[1:]]
    left = max(0.0, max(rest)) if rest else 0.0
    return late, left if math.isfinite(left) else 1.0


def _shorten(values: list[float]) -> str:
    return " ".join(f"{v:.3f}" for v in values[:6]) or "none"
