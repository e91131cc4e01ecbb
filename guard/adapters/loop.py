"""`check(factory)` of a `Loop`: a training loop with any models, optimisers, batches and losses, checked by the observers and
interventions of `trainworthy guard`.

The loop runs in this process, built anew for every rehearsal: once on its own batches, then on the same eight samples, then
on these with each other's inputs. Nothing else of a loop is known, so its loss may be anything.
"""

import contextlib
import gc
import io
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path
from trainworthy.core.base import seeds
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.verdict import Verdict
from trainworthy.core.recipe.stage import Expect
from trainworthy.guard.adapters.feeding import drive
from trainworthy.guard.adapters.loop_observer import Watcher, declared, modules, named, parameters
from trainworthy.guard.checks import interventions, invariants, run_checks
from trainworthy.guard.checks.results import CHECKS, OF_SCRIPTS, counted, finding, skip
from trainworthy.guard.hooks import events
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.rehearsals.child import uncompiled
from trainworthy.guard.rehearsals.control import Control, Plan
from trainworthy.guard.rehearsals.rehearsal import Outcome
from trainworthy.guard.rehearsals.sandbox import Sandbox
from trainworthy.guard.rehearsals.target import Target
from trainworthy.guard.verdicts import Guard

NO_OPTIMIZER = "there is no optimiser"  # why guard.control stops a script that has none
MOST = 200  # steps on eight samples, if `expect.overfit_steps` is not set
LINES = 12  # of its output, shown when the loop raises


@dataclass(kw_only=True)
class Loop:
    """A training loop and what it trains. The factory builds a new one at every call; only data may be shared."""

    models: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
    """Everything that trains, and what is declared in `expect`. A frozen teacher or a target network may be left out."""
    run: Callable[..., Any]
    """(batches): the script's own code for one epoch, or for as long as there are batches. Without `batches`: ()."""
    optimizers: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] = ()
    """Empty if the loop moves the weights itself."""
    batches: Any = None
    """A DataLoader, or anything that iterates over batches: a list, a generator, a function that returns one for each epoch."""
    evaluate: Callable[..., Any] | None = None
    """() -> the number that the script reports, or None. With `eval_batches`: (eval_batches)."""
    eval_batches: Any = None
    """What `evaluate` iterates over, if `evaluate` does not use its own DataLoader."""
    target: str | int | None = None
    """Entry of a batch (a name or a position) that is predicted from the others. Only needed where the loss takes no class
    numbers (regression): then eight samples must be learnt better than with each other's inputs."""
    higher_is_better: bool = True
    """Direction of `evaluate`, for `expect.overfit_metric`."""
    expect: Expect = field(default_factory=Expect)
    """Exceptions and expectations. Those that no check of a loop reads raise an error."""
    steps: int = 40
    """Optimiser steps of a rehearsal (more if they take less than `seconds`)."""
    seconds: float = 2.0
    """Least training time of a rehearsal."""


PASSED = {
    "batch_dependence": "dependency",
    "schedule": "schedule",
    "solvable_without_input": "overfit",
    "loss_may_rise": "overfit",
}
"""Fields of `Expect` that give the reason why a check does not apply."""
READ = (*PASSED, "overfit_steps", "loss_floor", "overfit_metric", "frozen", "no_gradient", "sampling")


class Ended(BaseException):
    """Leaves the loop when a rehearsal is over; no `except Exception` of the loop may catch it."""


def known() -> list[str]:
    """Return the ids of the checks that can be chosen or waived."""
    return [id for id in CHECKS if id not in OF_SCRIPTS]


def check(
    factory: Callable[[], Any],
    built: list,
    only: Sequence[str],
    waive: Mapping[str, str],
    seed: int,
    folder: Path | None,
    place: str,
) -> list[Verdict]:
    """Rehearse the loop and check it. `built`: a loop that the factory has built, taken out so that its memory is free after
    the second one."""
    first = built.pop()
    validate(first)
    console = Console()
    device = next((p.device for m in modules(first).values() for p in m.parameters()), torch.device("cpu"))
    console.say(f"{place} · seed {seed} · {device}")
    guard = LoopGuard(factory, first, only, waive, seed, folder, console, place)
    del first
    return guard.run()


# ------------------------------------------------------------------------------------------------------------ the loop
def validate(loop: Loop) -> None:
    """Raise one message for what cannot be rehearsed."""
    found = parameters(loop)
    if not found:
        raise UserError("the models of the Loop have no parameters", needed="models= everything that is trained")
    named(loop.optimizers, Optimizer, "optimizers")
    for what in ("run", "evaluate"):
        if getattr(loop, what) is not None and not callable(getattr(loop, what)):
            raise UserError(f"{what} of a Loop must be a function", got=type(getattr(loop, what)).__name__)
    for what in ("batches", "eval_batches"):
        given = getattr(loop, what)
        if given is not None and not callable(given) and not hasattr(given, "__iter__"):
            raise UserError(f"{what} of a Loop cannot be iterated over", got=type(given).__name__,
                            needed="a loader, a list, a generator, or a function that returns one")  # fmt: skip
    if loop.eval_batches is not None and loop.evaluate is None:
        raise UserError("eval_batches without evaluate", next="evaluate=lambda batches: ...")
    if loop.target is not None and loop.batches is None:
        raise UserError("target without batches", got=f"target={loop.target!r}", needed="batches=")
    default = Expect()
    for one in fields(Expect):
        value = getattr(loop.expect, one.name)
        if value == getattr(default, one.name):
            continue
        if one.name not in READ:
            what = f"no check of a Loop reads expect.{one.name}"
            raise UserError(what, got=repr(value), needed="one of " + ", ".join(READ))
        if callable(value):
            what = f"expect.{one.name} of a Loop must be a number"
            raise UserError(what, got="a function", cause="its batches are not known")
    if loop.expect.overfit_metric is not None and loop.evaluate is None:
        raise UserError("expect.overfit_metric without evaluate", needed="evaluate=")
    for prefix in (*loop.expect.frozen, *loop.expect.no_gradient):
        if not any(name.startswith(prefix) for name in found):
            needed = "a prefix of one of: " + ", ".join(list(found)[:8])
            raise UserError(f"no parameter begins with '{prefix}'", needed=needed)


# ------------------------------------------------------------------------------------------------------------ the guard
class LoopGuard(Guard):
    """The guard's verdicts on rehearsals in this process."""

    def __init__(
        self,
        factory: Callable[[], Loop],
        first: Loop,
        only: Sequence[str],
        waive: Mapping[str, str],
        seed: int,
        folder: Path | None,
        console: Console,
        place: str,
    ):
        values = {"--only": ",".join(only), "--waive": ",".join(waive), "--because": "", "--nproc": "1", "--seed": str(seed),
                  "--steps": str(first.steps), "--seconds": str(first.seconds)}  # fmt: skip
        target = Target(Path(place), [], entry=getattr(factory, "__name__", ""))
        super().__init__(target, values, True, console, Path(), folder or Path())
        self.factory, self.expect, self.reasons = factory, first.expect, waive
        self.first: Loop | None = first
        self.seed, self.written, self.higher = seed, folder is not None, first.higher_is_better

    def observe(self) -> dict[str, Any]:
        """Return the record of one rehearsal on the loop's own batches, without verdicts."""
        return self._rehearse(self._plan("watch")).record

    def run(self) -> list[Verdict]:
        began = time.monotonic()
        watch = self._watch()
        if self.written:
            self._sum_up(watch, time.monotonic() - began)
        else:
            count = counted(self.verdicts)
            self.console.say(f"       {count} of {len(self.verdicts)} checks, {time.monotonic() - began:.1f} s")
        return self.verdicts

    def _usable(self, watch: Outcome) -> None:
        if not watch.record["backwards"]:
            raise UserError("the loop made no backward()", needed="run= trains the models", got=watch.record["why"])

    def _end(self, watch: Outcome) -> None:
        """A Loop is one epoch: it has no end, and prints no scores of a whole run."""
        for id in ("ending", "progress"):
            self._verdict(skip(id, "a Loop is one epoch; `trainworthy guard` follows a whole script"))

    def _verdict(self, found: dict, seconds: float = 0.0) -> None:
        reasons = [getattr(self.expect, name) for name, id in PASSED.items() if id == found["id"]]
        if reason := next(filter(None, reasons), ""):
            found = skip(found["id"], f"by design: {reason}")
        elif "--batches" in found.get("skip", ""):
            found = {**found, "skip": "the Loop has no batches= to change"}
        self.values["--because"] = self.reasons.get(found["id"], "")
        super()._verdict(found, seconds)

    # --- rehearsals

    def _rehearse(self, plan: Plan) -> Outcome:
        gc.collect()  # the rehearsal before: its modules would be observed, too
        began, printed = time.monotonic(), io.StringIO()
        plan.seed = self.seed

        def stop(why: str) -> None:
            if why != NO_OPTIMIZER or seen.loop is None or seen.loop.batches is None:  # else the pass is cut
                raise Ended(why)

        control = Control(plan, stop)
        seen = Watcher(control)
        raised = ""
        seeds.seed_all(self.seed)
        with contextlib.ExitStack() as stack:
            stack.callback(seen.close)
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tw-")), "scratch")
            scratch.mkdir()
            stack.callback(events.remove)
            events.install(seen)
            _hold_back(seen, scratch)
            stack.enter_context(contextlib.redirect_stdout(printed))
            try:
                seen.loop = self._fresh(self.factory())
                plan.evaluate &= seen.loop.evaluate is not None or seen.loop.batches is not None
                why = drive(seen.loop, seen, control)
            except Ended as end:
                why = str(end)
            except Exception as error:
                if plan.name == "watch":
                    sys.stderr.write("".join(f"    {line}\n" for line in printed.getvalue().splitlines()[-LINES:]))
                    raise
                why, raised = "it raised", f"{type(error).__name__}: {error}"[:2000]
        record = self._record(seen, control, why, raised)
        return Outcome(record=record, output=printed.getvalue(), seconds=time.monotonic() - began)

    def _fresh(self, loop: Any) -> Loop:
        """Return the loop, after checking that it shares nothing that trains with the one before."""
        if not isinstance(loop, Loop):
            raise UserError("the factory must return a trainworthy.Loop every time", got=type(loop).__name__)
        if self.first is not None:
            mine = {id(p) for p in parameters(self.first).values()}
            if mine & {id(p) for p in parameters(loop).values()}:
                raise UserError("the factory returns the same model twice", needed="new models and optimisers at every call",
                                cause="they are built outside the factory")  # fmt: skip
            source = self.first.batches
            if isinstance(source, Iterator) and source is loop.batches:
                raise UserError("the factory returns the same generator twice", needed="a new one at every call, or a function "
                                "that returns one: batches=make_batches", cause="a generator can be read only once")  # fmt: skip
            self.first = None
        return loop

    def _record(self, seen: Watcher, control: Control, why: str, raised: str) -> dict[str, Any]:
        watch, expect = control.plan.name == "watch", self.expect
        own = seen.loop
        record: dict[str, Any] = {
            "why": why, "plan": asdict(control.plan), "steps": seen.steps, "backwards": seen.backwards,
            "evaluations": len(seen.scores) or len(control.evaluations(seen)), "passes": len(seen.passes),
            "losses": seen.losses[:2000], "notes": seen.notes, "scores": seen.scores, "written": [],
            "eight": len(control.kept) == 1 and any(p.calls and not p.backwards and p.ended for p in seen.passes),
        }  # fmt: skip
        if raised or own is None:
            return {**record, "raised": raised, "facts": {}}
        if watch:
            self._declare(seen, own, record)
        found = run_checks.check(seen, control.plan)
        if watch:
            found["findings"] = declared(seen, found["findings"])
        facts = found["facts"]
        if not facts["optimizers"] and seen.moves:
            facts["optimizers"] = 1  # by hand
        facts["declared"] = own.target is not None and not facts["loss_calls"] and facts["optimizers"] <= 1
        if facts["declared"]:
            facts["nll"] = seen.losses
        if watch and own.target is not None:
            facts["target"], facts["inputs"] = _leaf(own.target, seen), None
        facts["nll"] = [x - float(expect.loss_floor) for x in facts["nll"]]  # type: ignore[arg-type]  # a Loop takes a number
        return {**record, **found}

    def _declare(self, seen: Watcher, loop: Loop, record: dict) -> None:
        """Take what `expect` declares into what was observed; note optimisers that made no step."""
        for name, p in parameters(loop).items():
            if loop.expect.no_gradient and name.startswith(loop.expect.no_gradient):
                for group in seen.groups.values():
                    group.received.add(id(p))
                    group.zero.discard(id(p))
        if loop.expect.sampling:
            for one in seen.passes:
                one.order = []
        stepped = {id(g.ref()) for g in invariants.stepped(seen)}
        idle = [name for name, o in named(loop.optimizers, Optimizer, "").items() if id(o) not in stepped]
        record["notes"] += [f"no step was made by {name or 'the optimiser'} within this rehearsal" for name in idle]

    def _intervene(self, watch: Outcome) -> None:
        """The same eight samples, and these with each other's inputs."""
        began, facts = time.monotonic(), watch.record["facts"]
        goal, set_steps = self.expect.overfit_metric, self.expect.overfit_steps
        why = interventions.unsuitable(facts)
        most = MOST if set_steps == Expect().overfit_steps else set_steps
        entries = {"most": most, "target": facts.get("target"), "inputs": facts.get("inputs")}
        eight = others = Outcome()
        if not why or (goal is not None and facts["loader"]):
            plan = self._plan("eight", **entries)
            plan.steps = most if goal is not None else min(plan.steps, most)
            eight = self._rehearse(plan)
        if not why:
            others = self._rehearse(self._plan("others", evaluate=False, **entries))
        found = interventions.check(watch.record, eight.record, others.record)
        if goal is not None:
            found[-1] = self._goal(eight.record, float(goal))  # type: ignore[arg-type]  # a Loop takes a number
        for one in found:
            self._verdict(one, (time.monotonic() - began) / len(found))

    def _goal(self, eight: dict, goal: float) -> dict:
        """Compare the loop's own evaluation of eight samples that it has trained on with `expect.overfit_metric`."""
        if not eight or not eight["scores"] or eight.get("raised"):
            why = eight.get("raised") if eight else "the Loop has no batches= to change"
            return skip("metric", why or "evaluate() returned nothing in the rehearsal on eight samples")
        if not eight["eight"]:
            return skip("metric", "evaluate() did not get the eight samples: it draws from no DataLoader and "
                                   "eval_batches is not set, or its batches have another structure")  # fmt: skip
        got = eight["scores"][-1]
        ok = got >= goal if self.higher else got <= goal
        steps = eight["steps"] or eight["backwards"]
        words = f"evaluate() gives {got:.4g} on eight samples after {steps} steps on them, "
        cause = ("evaluate() prepares or counts samples differently from training (transform, mode, axis, another model)\n"
                 "the rate is too low, or expect.overfit_steps too few")  # fmt: skip
        return finding("metric", f"{words}{'at least' if self.higher else 'at most'} {goal:g} is declared",
                                  "" if ok else cause)  # fmt: skip


def _leaf(target: str | int | None, seen: Observer) -> int | None:
    """Return the index of an entry among a batch's tensors."""
    batch = next((b for p in seen.passes if p.training for b in p.recent), None)
    for i, (path, _) in enumerate(tree_flatten_with_path(batch)[0]):
        key = getattr(path[0], "key", getattr(path[0], "idx", getattr(path[0], "name", None))) if path else None
        if str(key) == str(target):  # "0" and 0, as in a Script
            return i
    needed = "a name or a position of a batch's entry"
    raise UserError("a batch has no such entry", got=f"target={target!r}", needed=needed)


def _hold_back(seen: Watcher, scratch: Path) -> None:
    """Leave torch.compile out, and write what the loop saves with torch.save to a scratch folder: a rehearsal must not
    replace a good checkpoint."""
    box = Sandbox(scratch)
    events.replace(torch, "save", box.saving)
    events.replace(torch, "load", box.loading)
    events.replace(torch, "compile", lambda _: uncompiled(seen))
