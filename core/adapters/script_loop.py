"""The own loop of a `Script`, rehearsed as a `Loop`: on its own loader, at its own rates, for more than one epoch.

Gates feed a loop chosen batches and hold its rates. What it does to both by itself (a schedule, a sampler, clipping, kept weights) shows
only here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader
from trainworthy.core.adapters import loop
from trainworthy.core.adapters.script_stage import Script
from trainworthy.core.base.console import Console
from trainworthy.core.base.verdict import Verdict
from trainworthy.core.guard.checks.results import skip, verdict
from trainworthy.core.recipe.stage import Expect

CHECKS = (
    "schedule",
    "gradients",
    "clipping",
    "modes",
    "evaluated",
    "targets",
    "direction",
    "noise",
    "loss-input",
    "samples",
    "passes",
    "state",
)
"""Checks of a loop that no gate makes."""
SECONDS = 1.0
EVALUATED = 256  # samples in a batch of an evaluation


def checks(script: Script) -> tuple[str, ...]:
    """Return the ids of the checks that a script gets. The order of a plain data set is not the script's own."""
    if script.train_loop is None:
        return ()
    return CHECKS if isinstance(script.train, DataLoader) else tuple(id for id in CHECKS if id != "samples")


def check(
    factory: Callable[[], Script], chosen: Sequence[str], waive: dict[str, str], seed: int, console: Console, place: str
) -> list[Verdict]:
    """Rehearse the loop once and return the verdicts of the `chosen` checks. If the loop cannot be rehearsed so, they are skipped with the
    reason."""
    try:
        return loop.watched(lambda: as_loop(factory()), chosen, waive, seed, console, place)
    except Exception as error:
        why = f"the loop cannot be rehearsed on a DataLoader: {type(error).__name__}: {error}"[:300]
        return [verdict(skip(id, why), "fail") for id in chosen]


def as_loop(script: Script) -> loop.Loop:
    train_loop = script.train_loop
    assert train_loop is not None
    val = _loader(script, script.val, batch_size=EVALUATED)
    return loop.Loop(
        models=script.model,
        optimizers=script.optimizer,
        batches=_loader(script, script.train, batch_size=script.batch_size, shuffle=True),
        run=lambda batches: train_loop(script.model, script.optimizer, batches),
        evaluate=lambda: script.metric(script.model, val),
        expect=Expect(frozen=tuple(script.frozen), batch_dependence=script.batch_dependence),
        seconds=SECONDS,
    )


def _loader(script: Script, source: Any, **how: Any) -> DataLoader:
    return source if isinstance(source, DataLoader) else DataLoader(source, collate_fn=script.collate, **how)
