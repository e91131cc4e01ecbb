"""What `trainworthy guard` sees in a script's own loop, on its own loaders, and in its source: gates of their own, and more causes for two
of core's gates."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from trainworthy.core.base.console import Console
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.gates.gate import Gate
from trainworthy.core.recipe.stage import Expect
from trainworthy.guard.adapters.loop import Loop, LoopGuard
from trainworthy.guard.adapters.script_stage import Script
from trainworthy.guard.checks import names
from trainworthy.guard.checks.results import CHECKS, skip

OWN = ("names", "samples", "passes", "targets", "loss-input", "noise", "direction", "clipping", "modes", "evaluated",
       "state")  # fmt: skip
"""Checks that are gates of a script."""
OF_LOOPS = ("gradients", "schedule")
"""Those of a script with a loop of its own: gates hold its rates at their peak, and feed it chosen batches."""
SHARED = ("wiring", "dependency")
"""Checks that a gate of core takes in, which has the same id."""
SECONDS = 1.0
See = Callable[[str], dict]


def observer(factory: Callable[[], Script], seed: int) -> See:
    """Return id -> what the check of this id found. The rehearsal runs once, at the first call. It raises Skip if the loop cannot be
    rehearsed on its own loaders."""

    @cache
    def found() -> dict[str, dict] | str:
        def make() -> Loop:
            return as_loop(factory())

        try:
            record = LoopGuard(make, make(), (), {}, seed, None, Console(), "").observe()
        except Exception as error:
            # A loop may rely on what core's batches have and its loader's have not: their device
            return f"not observed, the loop raises on its own loader: {type(error).__name__}: {error}"[:300]
        return {one["id"]: one for one in record["findings"]} if record["backwards"] else "the loop makes no backward()"

    def see(id: str) -> dict:
        if id == "names":
            return source(factory)
        findings = found()
        if isinstance(findings, str):
            raise Skip(findings)
        return findings[id]

    return see


def source(factory: Callable) -> dict:
    """Return the result of the check `names` of the file in which the factory is written."""
    if not inspect.isfunction(factory) or not (place := inspect.getsourcefile(factory)):
        return skip("names", "the source of the factory is not known")
    return names.check(Path(place), entry=factory.__name__)


def as_loop(script: Script) -> Loop:
    """Return a script's training and evaluation on its own loaders."""

    def loader(data: Any, *, shuffle: bool) -> DataLoader:
        if isinstance(data, DataLoader):
            return data
        return DataLoader(data, script.batch_size, shuffle=shuffle, collate_fn=script.collate)

    def plain(model: Any, optimizer: Any, batches: Any) -> None:
        for batch in batches:
            optimizer.zero_grad()
            script.loss(model, batch).backward()
            optimizer.step()

    train, val = loader(script.train, shuffle=True), loader(script.val, shuffle=False)
    return Loop(
        models=script.model, optimizers=script.optimizer, batches=train, seconds=SECONDS,
        run=partial(script.train_loop or plain, script.model, script.optimizer),
        evaluate=lambda: script.metric(script.model, val),
        expect=Expect(frozen=script.frozen, batch_dependence=script.batch_dependence),
    )  # fmt: skip


def gates(see: See, ids: tuple[str, ...]) -> list[Gate]:
    """Return the observers' own gates."""

    def measure(id: str, _: Any) -> Finding:
        one = see(id)
        if "skip" in one:
            raise Skip(one["skip"])
        return Finding(one["ok"], one["measured"], CHECKS[id][1], cause=one["cause"])

    return [Gate(id, "", CHECKS[id][0], partial(measure, id), explains=True) for id in ids]


def joined(finding: Finding, id: str, see: See) -> Finding:
    """Return a gate's finding, with the failure that the observers' check of the same id found in it."""
    try:
        one = see(id)
    except Skip:
        return finding
    if one.get("ok", True):
        return finding
    measured = one["measured"] if finding.ok else f"{finding.measured}; {one['measured']}"
    needed = CHECKS[id][1] if finding.ok else finding.needed
    cause = "\n".join(x for x in (one["cause"], finding.cause) if x)
    return replace(finding, ok=False, measured=measured, needed=needed, cause=cause)


def why_untrained(see: See) -> str:
    """Return what the observers say of a loop whose steps have no gradients, or others than those of its backward() calls."""
    try:
        return see("gradients").get("cause", "")
    except Skip:
        return ""
