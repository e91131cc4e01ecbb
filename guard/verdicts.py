"""Runs the rehearsals of one guard in order, and derives the verdicts."""

import dataclasses
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch  # noqa: F401  before any fork: a rehearsal then starts with it
from trainworthy.core.base.console import Console, list_names
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.verdict import Kind, Verdict, closing
from trainworthy.core.gates.runner import _show
from trainworthy.guard.checks import (
    ending,
    interventions,
    names,
    oracle,
    progress,
    ranks,
    restart,
    right_answers,
)
from trainworthy.guard.checks.results import CHECKS, LEARNING, finding, nearest, skip, verdict
from trainworthy.guard.measures.scores import denominators, printed_scores
from trainworthy.guard.rehearsals import rehearsal, sandbox
from trainworthy.guard.rehearsals.control import Plan
from trainworthy.guard.rehearsals.rehearsal import Outcome
from trainworthy.guard.rehearsals.target import Target

LINES = 12
GRACE = 5  # seconds that a script which was followed gets to write its record
LONGEST = 10  # times `--seconds`: the most a rehearsal trains


class Guard:
    """Runs the rehearsals and prints each verdict."""

    def __init__(
        self, target: Target, values: dict[str, str], interventions: bool, console: Console, work: Path, out: Path
    ):
        self.target, self.values, self.interventions = target, values, interventions
        self.console, self.work, self.out = console, work, out
        self.only = [x for x in values["--only"].split(",") if x]
        self.waived = [x for x in values["--waive"].split(",") if x]
        unknown = [x for x in (*self.only, *self.waived) if x not in CHECKS]
        if unknown:
            raise UserError(f"no check '{unknown[0]}'", needed=", ".join(CHECKS))
        self.verdicts: list[Verdict] = []

    def run(self) -> list[Verdict]:
        """Run all rehearsals, print all verdicts and write the evidence."""
        began = time.monotonic()
        before = sandbox.snapshot(Path.cwd())
        watch = self._watch()
        self._files(before, watch)
        self._sum_up(watch, time.monotonic() - began)
        return self.verdicts

    def _watch(self) -> Outcome:
        """Run the rehearsals, print their verdicts and return the outcome of the first one."""
        watch = self._rehearse(self._plan("watch"))
        self._usable(watch)
        r = watch.record
        self.console.say(
            f"watch  {r['steps']} optimiser steps, {r['evaluations']} evaluation{'s' * (r['evaluations'] != 1)}, "
            f"{r['passes']} passes over loaders; stopped: {r['why']}  [{watch.seconds:.1f} s]"
        )
        for note in dict.fromkeys(r["notes"]):
            self.console.say(f"       {note}")
        if r.get("error"):
            self.console.say(r["error"])
        for found in r.get("findings", []):
            self._verdict(found, found.get("seconds", 0.0))
        if r.get("ranks"):
            self._verdict(ranks.check(r))
        self._names()
        if self.interventions and not (self.only and set(LEARNING).isdisjoint(self.only)):
            self._intervene(watch)
        if self.interventions and not (self.only and not {"ending", "progress", "later"} & set(self.only)):
            self._end(watch)
        if self.values.get("--restart"):
            self._restart(watch)
        return watch

    def _sum_up(self, watch: Outcome, seconds: float) -> None:
        """Write the evidence and print the counts."""
        from trainworthy.guard.page import write

        failed = [v for v in self.verdicts if v.blocks]
        path = write(
            self.out,
            self.verdicts,
            seconds=round(seconds, 1),
            script=str(self.target.path),
            watched={k: v for k, v in watch.record.items() if k not in ("findings", "losses")},
        )
        counts = [sum(v.verdict == k for v in self.verdicts) for k in ("pass", "skip")]
        self.console.say(
            f"       {counts[0]} of {len(self.verdicts)} checks passed, {counts[1]} skipped, {seconds:.1f} s"
        )
        learning = [v for v in self.verdicts if v.id in LEARNING]
        if learning and all(v.verdict == "skip" for v in learning):
            self.console.say(
                f"       not tested: whether the loop learns ({', '.join(LEARNING)}): {learning[0].reason}"
            )
        if failed:
            self.console.say(
                f"stopped: {closing(nearest(failed), len(failed), len(self.verdicts), 'checks')}", style="bold red"
            )
        self.console.say(f"  evidence:     {path}")

    def _plan(self, name: str, **more: Any) -> Plan:
        steps, seconds = int(float(self.values["--steps"])), float(self.values["--seconds"])
        given = {
            "steps": steps,
            "seconds": seconds,
            "limit": max(Plan.limit, LONGEST * seconds),
            "ranks": int(self.values["--nproc"]),
            "seed": int(self.values["--seed"]),
        }
        return Plan(name, **(given | {"restart": bool(self.values.get("--restart"))} | more))

    def _start(self, plan: Plan) -> tuple[int, Path]:
        folder = self.work / plan.name
        below = self.work / "watch" / ("scratch" if plan.name == "restart" else "prepared")
        return rehearsal.start(self.target, plan, folder, below if plan.name != "watch" else None), folder

    def _wait(self, pid: int, folder: Path, plan: Plan) -> Outcome:
        return rehearsal.wait(
            pid,
            folder,
            load=float(self.values["--load-seconds"]),
            limit=plan.limit + (GRACE if plan.name == "end" else 60),
            say=self.console.say,
        )

    def _rehearse(self, plan: Plan) -> Outcome:
        return self._together([plan])[0]

    def _together(self, plans: list[Plan]) -> list[Outcome]:
        """Rehearse all at the same time. No child outlives the command, however it ends."""
        started: list[tuple[Plan, int, Path]] = []
        try:
            for plan in plans:
                started.append((plan, *self._start(plan)))
            return [self._wait(pid, folder, plan) for plan, pid, folder in started]
        except BaseException:
            for _, pid, _ in started:
                rehearsal.kill(pid)
            raise

    def _usable(self, watch: Outcome) -> None:
        """Raise one clear message if there is nothing to check."""
        r, lines = watch.record, watch.output.strip().splitlines()
        output = "".join(f"\n    {line[:200]}" for line in lines[-LINES:])
        name = f"-m {self.target.module}" if self.target.module else shlex.quote(os.path.relpath(self.target.path))
        count = int(self.values["--nproc"])
        launch = "python" if count == 1 else f"torchrun --nproc_per_node {count}"
        again = " ".join([launch, name, *self.target.argv])
        if watch.late:
            what = "the rehearsal did not end"
            if not (r or {}).get("steps"):
                what = f"the script made no optimiser step in {self.values['--load-seconds']} s"
            raise UserError(what, needed="a first step", next="--load-seconds 3600")
        if not r:
            how = f"signal {watch.signal}" if watch.signal else f"exit code {watch.code}"
            raise UserError(f"the script ended its own process ({how}) and left nothing to check{output}", next=again)
        if r["why"] == "it raised":
            files = any(names_file(r["raised"], Path(w)) for w in r["written"])
            cause = "a library that opens files in C looks for what a rehearsal wrote elsewhere (docs/own-scripts.md)"
            if count == 1 and any(
                re.search(rf"\b{word}\b", r["raised"]) for word in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            ):
                again = f"trainworthy guard --nproc 2 {name}"
            raised = re.sub(r"\x1b\[[0-9;]*m", "", r["raised"]).strip().splitlines()
            brief = f"{raised[0]} {raised[-1]}" if " in DataLoader worker process" in raised[0] else raised[0]
            rank = f" (rank {r['rank']})" if r.get("rank") else ""
            if elsewhere := _next_to_script(r["raised"], self.target.path):
                home, file = (shlex.quote(p) for p in (os.path.relpath(self.target.path.parent), self.target.path.name))
                raise UserError(f"the script fails by itself{rank}: {brief}", got=r.get("where"),
                                cause=f"{os.path.relpath(elsewhere)} is next to the script, which reads it from the current folder",
                                next=f"cd {home} && trainworthy guard {file}")  # fmt: skip
            if raised[0].startswith("EOFError"):
                raise UserError(f"the script reads from the terminal{rank}: {brief}", got=r.get("where"), needed="a script that asks for nothing",
                                cause="rehearsals run several times, side by side: they get no input, also if it is piped",
                                next=f"give it as an argument: trainworthy guard {name} -- VALUE")  # fmt: skip
            raise UserError(f"the script fails by itself{rank}: {brief}", got=r.get("where"),
                            cause=cause if files else "", next=again)  # fmt: skip
        if not r["steps"] and not r["backwards"]:
            code = r.get("exit")
            if code == 2 and any(line.startswith("usage:") for line in lines):
                raise UserError(
                    f"the script needs other arguments{output}",
                    next=f"trainworthy guard {name} -- ARGUMENTS",
                )
            ended = f"ended with exit code {code}" if code else "ended"
            raise UserError(
                f"the script {ended} without an optimiser step or a backward(){output or ' and printed nothing'}",
                needed="a script that trains in its own process",
                next=again,
            )

    def _verdict(self, found: dict, seconds: float = 0.0) -> None:
        if self.only and found["id"] not in self.only:
            return
        failed: Kind = "waived" if found["id"] in self.waived else "fail"
        self.verdicts.append(verdict(found, failed, seconds, self.values["--because"] or "waived"))
        _show(self.verdicts[-1], self.console)

    def _intervene(self, watch: Outcome) -> None:
        """Rehearse on eight samples, and on the same samples with each other's inputs."""
        why = interventions.unsuitable(watch.record["facts"])
        began = time.monotonic()
        eight = others = Outcome()
        facts = watch.record["facts"]
        if not why or interventions.repeatable(facts, watch.output):
            more = {"most": 200, "target": facts["target"], "inputs": facts["inputs"]}
            plans = [self._plan("eight", **more), self._plan("others", **more, evaluate=False)][: 1 if why else 2]
            eight, others = (*self._side_by_side(plans, watch), others)[:2]
        found = interventions.check(watch.record, eight.record, others.record, eight.output)
        if longer := interventions.hasty(found[0], eight.record):
            plans = [dataclasses.replace(plan, steps=longer, most=longer) for plan in plans]
            eight, others = self._side_by_side(plans, watch)
            found = interventions.check(watch.record, eight.record, others.record, eight.output)
        if "skip" in found[-1] and not watch.record.get("ranks"):
            found[-1] = self._answer(watch) or found[-1]
        if scored := watch.record.get("scored"):
            found[-1] = finding("metric", *scored)
        elif miscounted := denominators.always(facts["counted"], watch.output):
            found[-1] = finding("metric", *miscounted)
        for one in found:
            self._verdict(one, (time.monotonic() - began) / len(found))

    def _side_by_side(self, plans: list[Plan], watch: Outcome) -> list[Outcome]:
        """Of several processes one after the other: scripts choose fixed ports, and cores are taken."""
        return [self._rehearse(plan) for plan in plans] if watch.record.get("ranks") else self._together(plans)

    def _answer(self, watch: Outcome) -> dict | None:
        """Put right and wrong answers into the script's own evaluation, if it evaluates over a loader and prints a score."""
        if not watch.record["evaluations"] or not set(printed_scores.scores(watch.output)) & oracle.NEEDED.keys():
            return None
        limit = max(10.0, 2 * float(self.values["--seconds"]))
        done = self._rehearse(
            self._plan("oracle", steps=2, seconds=0.0, eval_batches=10**9, limit=limit, restart=False)
        )
        return oracle.check(done.record.get("oracle", []), done.output)

    def _end(self, watch: Outcome) -> None:
        """Follow the script to its end, its passes cut short."""
        began, why = time.monotonic(), ""
        if watch.record.get("ranks"):
            why = "several processes: their passes cannot be cut short together"
        elif any(v.blocks for v in self.verdicts):
            why = "other checks failed"
        if why:
            self._verdict(skip("ending", why))
            return self._verdict(skip("progress", why))
        limit = max(4.0, 2 * float(self.values["--seconds"]))
        more = {"limit": limit, "restart": False}
        done = self._rehearse(self._plan("end", steps=10**9, most=10**9, **more))
        if done.record.get("why") == "it raised":  # a pass that was cut may have computed what the script reads later
            more["whole"] = True
            done = self._rehearse(self._plan("end", steps=10**9, most=10**9, **more))
        found = ending.answer(watch.record, done.record, done.late, done.output, limit, done.code)
        if found.get("ok"):
            found = self._answered(watch, done, more) or found
        self._verdict(found, time.monotonic() - began)
        if not self.only or "progress" in self.only:
            self._progress(watch, done, more)
        if number := done.record.get("later", 0):
            began = time.monotonic()
            plan = self._plan("later", **(more | {"later": number, "limit": max(30.0, 2.5 * limit)}))
            self._verdict(ending.second(self._rehearse(plan).record), time.monotonic() - began)

    def _answered(self, watch: Outcome, ended: Outcome, given: dict) -> dict | None:
        """Follow the script to its end with right answers in all evaluations. Return what is wrong with its scores, or None."""
        facts = watch.record["facts"]
        if not right_answers.suitable(facts, ended):
            return None
        more = {**given, "whole": True, "lengths": ended.record["progress"]["lengths"], "target": facts["target"]}
        more |= {"limit": 1.5 * given["limit"], "numbers": right_answers.numeric(facts)}
        fault = right_answers.check(
            ended, lambda name: self._rehearse(self._plan(name, steps=10**9, most=10**9, **more))
        )
        return finding("ending", *fault) if fault else None

    def _progress(self, watch: Outcome, ended: Outcome, given: dict) -> None:
        """Compare what the script prints with what it prints when its weights stay as they were drawn."""
        began = time.monotonic()

        def rehearse(*plans: tuple[str, dict]) -> list[Outcome]:
            ready = [self._plan(name, steps=10**9, most=10**9, **(given | more)) for name, more in plans]
            return self._together(ready)

        if any(v.blocks for v in self.verdicts):
            return self._verdict(skip("progress", "the check of the script's end failed"))
        found = progress.check(ended, rehearse, given["limit"], watch.record.get("facts"), self.console.say)
        return self._verdict(found, time.monotonic() - began)

    def _restart(self, watch: Outcome) -> None:
        """Start the script again from the last file that it saved, and compare what it holds at its first backward()."""
        began, saves = time.monotonic(), watch.record.get("restart", {}).get("saves")
        if not saves:
            why = "the script saved nothing with torch.save in the rehearsal; rehearse longer with --steps 400 --seconds 60"
            return self._verdict(skip("resume", why))
        path = saves[-1]["path"].removeprefix(str(self.work / "watch" / "scratch"))
        words = self.values["--restart"].replace("{checkpoint}", path).replace("{folder}", os.path.dirname(path))
        target = dataclasses.replace(self.target, argv=[*self.target.argv, *shlex.split(words)])
        with mock.patch.object(self, "target", target):
            again = self._rehearse(self._plan("restart", steps=1, seconds=0.0, evaluate=False))
        found = restart.check(watch.record, again.record, words)
        return self._verdict(found, time.monotonic() - began)

    def _names(self) -> None:
        """Check names in the source, without running it."""
        began = time.monotonic()
        try:
            found = names.check(self.target.path, self.target.argv, self.target.entry)
        except Exception as error:
            found = skip("names", f"could not be checked: {type(error).__name__}: {error}"[:300])
        self._verdict(found, time.monotonic() - began)

    def _files(self, before: dict, watch: Outcome) -> None:
        """Report files in the working directory that changed although writes are redirected."""
        mine = str(self.out)
        different = [p for p in sandbox.changed(before, sandbox.snapshot(Path.cwd())) if not p.startswith(mine)]
        held = watch.record.get("written", [])
        summary = f"{len(held)} files written went to a scratch folder"
        if different:
            summary = f"changed in the working directory during the rehearsals: {list_names(different, 3)}"
            self.console.say(
                f"  WARNING       {summary}: by a program that the script starts, by a library that writes in C, or by another process",
                style="bold yellow",
            )
        self._verdict(finding("files", summary))


def names_file(message: str, written: Path) -> bool:
    """Return whether an error's message names a file that the script wrote, or its folder. Names without a dot are words."""
    folder = [str(written.parent)] if len(written.parts) > 2 else []
    names = [str(written), *folder, *([written.name] if "." in written.name else [])]
    return any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", message) for name in names)


def _next_to_script(message: str, script: Path) -> Path | None:
    """Return the file that a FileNotFoundError did not find in the current folder, if it is where the script is."""
    found = re.search(r"FileNotFoundError: .*'([^']+)'", message)
    if not found or Path(found[1]).is_absolute() or script.parent.resolve() == Path.cwd():
        return None
    there = script.parent / found[1]
    return there if there.exists() else None
