"""Checks fine-tuning: the model has the weights that it should start from, and no other state of that run."""

from collections.abc import Collection
from itertools import takewhile

from trainworthy.core.base.console import list_names
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.gates.recorder import rehearsed
from trainworthy.core.loop.init_from import match

NEEDED = 0.9


@gate(
    "init",
    rows="C14",
    title="fine-tuning starts from the file's weights, and from no other state of that run",
    reads="model optimizers expect pretrained train",
)
def init(context: GateContext) -> Finding:
    """Compare inside `train()`, just before its first optimiser step, so that every change after loading counts.
    Buffers are not compared, because statistics may be the recipe's own."""
    if context.look()[1].pretrained is None:
        raise Skip("trained from scratch")
    _, stage, record = rehearsed(context)
    if record.start is None:
        raise Skip("the training loop made no optimiser step (see wiring)")
    share, changed, old = record.start
    fresh, fits = stage.expect.new_parameters, match(stage.model, stage.pretrained)
    missing = [n for n in fits.missing if not n.startswith(fresh)]
    wrong, remedy = [], []
    if changed:
        wrong.append(f"{len(changed)} tensors are in the file and differ from it, e.g. {list_names(changed)}")
        again = "initialised again after loading (a new head: declare expect.new_parameters)"
        if fits.prefix and share < 0.5:  # with the prefix taken off, most of the file is there
            remedy.append(f"the names only fit with their {fits.prefix}: strict=False loaded nothing")
        elif part := _whole_part(changed, {n for n, _ in stage.model.named_parameters()} & fits.pairs.keys()):
            remedy.append(f"nothing of '{part}' was loaded: its names differ under strict=False; or it was {again}")
        else:
            remedy.append(f"{again}, or never loaded")
    if share < NEEDED:
        for what, names in (("not in the file", missing), ("of another shape", fits.mismatched)):
            if names:
                wrong.append(f"{len(names)} {what}: {list_names(names)}")
        if fits.unexpected:
            wrong.append(
                f"{len(fits.unexpected)} tensors of the file are not in the model: {list_names(fits.unexpected)}"
            )
        remedy.append("names that differ (key prefix) under strict=False, a file of another model or of a part of it")
    if old:
        wrong.append(f"the optimiser holds {', '.join(old)} before its first step")
        remedy.append(
            "the old run's optimiser was loaded too: fine-tuning takes weights only; to continue, use trainworthy resume"
        )
    packed = sum(not p.is_floating_point() for p in stage.model.parameters())
    aside = f", without {packed} integer tensors (the recipe's own gates check those)" * bool(packed)
    return Finding(
        not wrong, "; ".join([f"{share:.1%} of the parameters are the file's{aside}", *wrong]),
        f"{NEEDED:.0%} of those that are not declared new, every one that is in the file; an optimiser without state",
        "\n".join(remedy),
        evidence={"share": share, "changed": changed, "missing": missing, "unexpected": fits.unexpected,
                  "mismatched": fits.mismatched, "prefix": fits.prefix, "optimiser": old},
    )  # fmt: skip


def _whole_part(changed: Collection[str], known: Collection[str]) -> str:
    """Return the module whose tensors are all in `changed`, and no others; "" if there is none. `known`: names of the file."""
    parts = [name.split(".")[:-1] for name in changed]
    same = [level[0] for level in takewhile(lambda level: len({*level}) == 1, zip(*parts, strict=False))]
    prefix = ".".join(same)
    inside = [name for name in known if name.startswith(f"{prefix}.")]
    return prefix if prefix and len(inside) > 1 and {*inside} <= {*changed} else ""
