"""`trainworthy lr`: a learning-rate range test on the real data, with a plot and a suggestion (or none)."""

import json
import shlex
from typing import Any

from trainworthy.core.base import masking
from trainworthy.core.commands import open_recipe, prints_json, take_number
from trainworthy.core.gates.checks import rates
from trainworthy.core.loop.lr_finder import LRFinder
from trainworthy.core.loop.run import Rehearsal
from trainworthy.core.session import stages
from trainworthy.core.session.session import Session, open_session, session_lock, write_start
from trainworthy.core.session.stages import StageSpec

STEPS = 200


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    """Test each stage; put what was found into `output`. A stage without a usable rate is no error."""
    argv, steps = take_number(argv, "--steps", 10)
    loaded, cfg, preset = open_recipe("lr", argv)
    session = open_session(loaded, cfg, preset, argv, kind="checks")
    rows: list[dict[str, Any]] = []
    with session_lock(session):
        write_start(session)
        for spec, context in stages.contexts(session):
            run, stage = context.build(Rehearsal(steps=1))
            made = "" if "train" in stage.data else "no training set: the loop makes its own samples"
            if stage.expect.range_test or made or len(stage.optimizers) > 1:
                why = stage.expect.range_test or made or "several optimisers: no single rate to test"
                session.console.say(f"lr     {stage.name}: no range test: {why}")
                rows.append({"stage": stage.name, "tested": False, "why": why})
                continue
            spread = rates.spread(spec.cfg.optim.lr)
            finder = rates.sweep(run, stage, **spread, steps=steps or STEPS)
            on = f"{len(finder.rates)} fresh batches of {spec.cfg.train.batch_size}"
            rows.append(print_result(session, spec, stage.name, finder, on))
            if finder.suggested_lr() is None:
                one = rates.sweep(run, stage, **spread, steps=rates.STEPS, only=0)
                on = "one batch again and again, without the noise between batches"
                rows.append(print_result(session, spec, f"{stage.name}-one-batch", one, on))
    output |= {"folder": str(session.folder), "stages": rows}


def print_result(session: Session, spec: StageSpec, name: str, finder: LRFinder, on: str) -> dict[str, Any]:
    """Print the result of a test, write plot and numbers, and return it."""
    rate, band, cfg = finder.suggested_lr(), finder.band(), spec.cfg
    setting = f"{spec.name}.lr" if spec.of > 1 else "optim.lr"
    row = {"stage": name, "tested": True, "setting": setting, "suggestion": rate, "configured": cfg.optim.lr,
           "verdict": finder.verdict, "falls_from": band.low if rate else None, "usable_to": band.high if rate else None,
           "blew_up": band.blew_up if rate else None}  # fmt: skip
    if not session.main:
        return row
    plot = finder.plot(session.folder / "plots" / f"range_test_{name}.png", configured=cfg.optim.lr)
    found = {"suggestion": rate, "verdict": finder.verdict, "rates": finder.rates, "losses": finder.losses,
             "smoothed": finder.smoothed}  # fmt: skip
    plot.with_suffix(".json").write_text(json.dumps(found, indent=1))
    row["plot"] = str(plot)
    say = session.console.say
    tried = f", {finder.rates[0]:.0e} to {finder.rates[-1]:.0e}" if finder.rates else ""
    say(f"\nlr     {name}: {on}{tried}")
    if rate is None:
        say(f"  no usable rate: {finder.verdict}\n  plot          {plot}", style="yellow")
        say("  next          a larger --train.batch-size or more --steps (less noise), or trainworthy check")
        return row
    top = f"blows up at {band.high:.2g}" if band.blew_up else f"still falls at {band.high:.2g}, the last tried"
    again = ["trainworthy", "run", *masking.words(session.argv), f"--{setting}", f"{rate:.1e}"]
    say(f"  the loss      falls from {band.low:.2g} on and {top}; {finder.verdict}")
    say(f"  suggestion    {rate:.1e}, a third of the rate of steepest descent (configured: {cfg.optim.lr:g})")
    say(f"  plot          {plot}\n  next          {shlex.join(again)}")
    return row
