"""Label smoothing (C16): the loss smooths its targets by the amount of the setting.

The gate `formula` accepts cross-entropy with any usual smoothing, because a fork may write its own, so it passes a loss that does not read
the setting. The loss floor does not show it either: without smoothing, the loss ends below the floor.
"""

import torch
from torch import Tensor, nn
from trainworthy.core.base.modes import hooked, in_mode
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.formula import limit, row, term_of
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Stage
from trainworthy.recipes.vision.gates.objective import unsmoothed

SAMPLES = 16
CLOSE = 0.005  # between two values of the smoothing; published ones differ by 0.05
READABLE = 0.05  # nats: how much a whole unit of smoothing must change a sample's loss, so that its share can be read


@gate(
    "smoothing", rows="C16", title="targets are smoothed by --label-smoothing", reads="data model loss train",
    explains=True,
)  # fmt: skip
def check(context: GateContext) -> Finding:
    """Read the smoothing from the loss of single samples, which is linear in it: (1 - e) times the cross-entropy with the own class, plus
    e times the mean over all classes. Smoothing over the other classes alone, and in train mode alone, are the setting's, too."""
    eps = context.cfg.label_smoothing
    if context.cfg.balance.by == "focal":
        raise Skip("focal loss has no label smoothing")
    run, stage, _ = rehearsed(context)
    data, seed = stage.data["train"], context.cfg.run.seed
    batch = fetch(data, pick(data, min(SAMPLES, stage.expect.at_most(SAMPLES)), seed), seed, run.device)
    found = {mode: _share(run, stage, batch, training=mode == "train") for mode in ("train", "eval")}
    shares = {mode: e for mode, e in found.items() if e is not None}
    if not shares:
        raise Skip("the loss is no cross-entropy with smoothed targets")
    n = len(data.fields["label"].classes)
    close = max(CLOSE, limit(run, CLOSE))
    off = {abs(e - form): e for e in shares.values() for form in (eps, eps * n / (n - 1))}
    ok, seen = min(off) <= close, off[min(off)]
    return Finding(
        ok, f"the loss has label smoothing {_short(seen)}, read from {len(batch['label'])} samples",
        f"--label-smoothing {eps:g} within {close:g}",
        "label_smoothing= is missing in the loss, or is a constant\nthe loss reads the setting of another object",
        evidence=shares, batch=None if ok else batch,
        cause="" if ok else f"the loss does not read --label-smoothing: {_short(seen)} instead of {eps:g}",
    )  # fmt: skip


def _short(value: float) -> str:
    return f"{abs(round(value, 3)):g}"


def _share(run: Run, stage: Stage, batch: dict, *, training: bool) -> float | None:
    """Return the smoothing of the loss, or None if no one value fits every sample."""
    model, seen = stage.model, []
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def spread(_module: nn.Module, _args: tuple, out: object) -> object:
        """Add scores that differ between the classes: after a few steps, those of the net alone may be nearly equal."""
        if isinstance(out, Tensor) and out.ndim == 2:
            out = out + torch.linspace(-2, 2, out.shape[1], device=out.device, dtype=out.dtype)
        seen.append(out)
        return out

    with (
        run.autocast(), torch.no_grad(), in_mode(model, training=False),
        hooked([model.register_forward_hook(spread)]),
    ):  # fmt: skip
        model.training = training  # of the whole alone: batch norm and dropout inside stay in eval mode
        for i in range(len(batch["label"])):
            one = row(batch, i)
            seen.clear()
            loss, counts = term_of(stage.loss(model, one), "ce", ("ce",)), stage.counts(one)
            if len(seen) != 1 or not isinstance(seen[0], Tensor) or seen[0].ndim != 2:
                return None
            log_p = seen[0].double().log_softmax(1)
            weight, truth = float(counts.get("ce", counts.get("*", 1))), unsmoothed(one, log_p.shape[1])
            found.append((loss.double() / weight, -(truth * log_p).sum(), -log_p.mean()))
    loss, own, even = (torch.stack(x) for x in zip(*found, strict=True))
    slope = even - own
    clear = slope.abs() > READABLE
    if not clear.any():
        return None
    share = (loss - own)[clear] / slope[clear]
    spread = (share - share.median()).abs().max()
    return share.median().item() if spread <= limit(run, CLOSE) else None
