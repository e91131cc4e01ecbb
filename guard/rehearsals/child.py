"""One rehearsal inside its process: sandbox, observers and plan around the script, and the record that the parent reads."""

import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainworthy.core.base.clock import now
from trainworthy.guard import HOME
from trainworthy.guard.checks import ranks, run_checks
from trainworthy.guard.checks.restart import Restart
from trainworthy.guard.checks.results import ENDED
from trainworthy.guard.hooks import events, patches
from trainworthy.guard.observing.evidence import Evidence
from trainworthy.guard.observing.observer import Observer
from trainworthy.guard.observing.to_the_end import Following
from trainworthy.guard.rehearsals.control import TO_THE_END, Control, Plan
from trainworthy.guard.rehearsals.running import run
from trainworthy.guard.rehearsals.sandbox import TRACKERS, Sandbox, after_import, hold_uploads
from trainworthy.guard.rehearsals.target import Target


class Rehearsal:
    """Runs a script under a plan and writes record.json, whichever way it ends."""

    def __init__(self, plan: Plan, folder: Path):
        self.plan, self.folder = plan, folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.sandbox = Sandbox(self.scratch)
        self.control = Control(plan, self.stop)
        self.control.begin = self.begin
        self.seen = Following(self.control) if plan.name in TO_THE_END else Observer(self.control)
        self.seen.restart = Restart() if plan.restart else None
        self.done, self.process, self.ended = False, os.getpid(), threading.RLock()
        self.rank, self.count, self.home = 0, 1, folder
        self._open, self._replace = open, os.replace  # before they are redirected

    def run(self, target: Target, below: Path | None) -> int:
        """The script; returns the exit code of this process."""
        self._prepare(below)
        if self.plan.ranks > 1:
            ranks.spread(self, self.plan.ranks, launched=True)
        return self._guarded(lambda: run(target, self.seen, self.control))

    def _guarded(self, function: Any) -> int:
        """Call `function`; whichever way it ends, the record is written. Returns the exit code."""
        try:
            function()
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 1
            if isinstance(leave.code, str):
                print(leave.code, file=sys.stderr)
            self.finish(ENDED, exit=code)
            return code
        except BaseException as error:
            if self._ran_out(error):
                self.finish("enough")
                return 0
            frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(HOME)]
            traceback.print_exc()
            where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            if isinstance(error, SyntaxError) and error.filename:
                where = f"{error.filename}:{error.lineno}"
            self.finish("it raised", raised=shortened(f"{type(error).__name__}: {error}"), where=where)
            return 1
        self.finish(ENDED)
        return 0

    def _ran_out(self, error: BaseException) -> bool:
        """Return whether the script called `next()` on a generator of its own, around a loader whose pass the rehearsal had ended."""
        exhausted = isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration)
        return exhausted and self.plan.name not in TO_THE_END and any(p.was_cut for p in self.seen.passes)

    def _prepare(self, below: Path | None) -> None:
        short = self.folder / "t"  # sockets of worker processes are opened in it, and their names must be short
        short.mkdir(exist_ok=True)
        tempfile.tempdir = str(short)
        os.environ.update(
            TRACKERS, TMPDIR=str(short), MLFLOW_TRACKING_URI=f"file:{self.scratch}/mlruns", TQDM_DISABLE="1"
        )
        if below is not None and below.is_dir():
            shutil.copytree(below, self.scratch, dirs_exist_ok=True, symlinks=True)
        sys.dont_write_bytecode = True
        seed = self.plan.seed
        if seed is not None:
            seed += self.plan.reseed
            torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
        self.sandbox.install()  # below the observers: `trainworthy.check` in a script takes these away for a while
        events.install(self.seen)
        patches.rehearsal = self.seen.notes.append
        if self.plan.reseed:
            reseeded(self.plan.reseed)
        torch.compile = uncompiled(self.seen)
        torch.multiprocessing.spawn = self.spawned(torch.multiprocessing.spawn)
        hold_uploads()
        after_import(
            "transformers.generation.utils",
            lambda m: patches.before(
                m.GenerationMixin, "generate", lambda *a, **k: self.seen.generations.note(*a, **k)
            ),
        )
        if isinstance(self.seen.evidence, Evidence):  # a rehearsal to the script's end records none
            dropped = self.seen.evidence.dropped_rows
            after_import("datasets.arrow_dataset", lambda m: patches.after(m.Dataset, "filter", dropped.note))

    def begin(self) -> None:
        """The first backward(): the parent's clock starts, and what was written so far (downloads, prepared data) is kept for the
        next rehearsals."""
        if self.rank:
            return
        self.sandbox.off = True
        (self.folder / "first-step").touch()
        if sum(f.stat().st_size for f in self.scratch.rglob("*") if f.is_file()) < 2 * 10**9:
            shutil.copytree(self.scratch, self.folder / "prepared", dirs_exist_ok=True, symlinks=True)
        self.sandbox.off = False

    def stop(self, why: str) -> None:
        """Leave the process: nothing of the script runs after this."""
        self.finish(why)
        sys.stdout.flush()
        os._exit(0)

    def finish(self, why: str, **more: Any) -> None:
        """Run the checks on what was recorded and write the record, once."""
        if os.getpid() != self.process:
            return
        with self.ended:  # the other ranks' end comes in a thread
            if not self.done:
                self.done = True
                self._finish(why, **more)
                if self.count > 1 and not self.rank:
                    ranks.join(self)

    def _finish(self, why: str, **more: Any) -> None:
        events.remove()
        seen, lasted = self.seen, now() - self.control.started
        try:
            found = run_checks.check(seen, self.plan) if not self.rank else {}
            if seen.restart is not None:
                found["restart"] = seen.restart.facts(seen)
            if self.count > 1:
                found["between"] = ranks.facts(seen)
        except Exception:
            found = {"error": traceback.format_exc()}
        facts = {
            "why": why, "plan": asdict(self.plan), "lasted": lasted, "steps": seen.steps, "backwards": seen.backwards,
            "evaluations": len(self.control.evaluations(seen)), "passes": len(seen.passes), "losses": seen.losses[:2000],
            "notes": seen.notes, "written": sorted(set(self.sandbox.written))[:200], "escaped": self.sandbox.escaped,
            "at": time.time(), "unrecorded": seen.evidence.error if isinstance(seen.evidence, Evidence) else "",
        }  # fmt: skip
        self.write(self.folder / "record.json", {**facts, **found, **more})

    def write(self, path: Path, record: dict[str, Any]) -> None:
        """Write a record at once: another process waits for it."""
        spare = path.with_suffix(".spare")
        with self._open(spare, "w") as file:
            json.dump(record, file, default=str)
        self._replace(spare, path)

    def spawned(self, original: Any) -> Any:
        """torch.multiprocessing.spawn: the processes it would start are forks of this one, and are rehearsed."""

        def spawn(fn: Any, args: tuple = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
            if self.count > 1 or nprocs < 1:
                return original(fn, args, nprocs)
            own = ranks.spread(self, nprocs, launched=False) if nprocs > 1 else 0
            if own:
                os._exit(self._guarded(lambda: fn(own, *args)))
            fn(0, *args)
            return None

        return spawn


def shortened(text: str) -> str:
    """Return the beginning and the end of a message: that of a worker process ends with the error itself."""
    return text if len(text) <= 2000 else f"{text[:1000]}\n{text[-1000:]}"


def uncompiled(seen: Observer) -> Any:
    """torch.compile gives the model back as it is: a rehearsal is shorter than a compilation."""

    def compile(model: Any = None, **kwargs: Any) -> Any:
        seen.notes.append("torch.compile is left out in rehearsals")
        return (lambda m: m) if model is None else model

    return compile


def reseeded(by: int) -> None:
    """The script's own calls that set a seed set another one."""

    def other(original: Any) -> Any:
        return lambda seed=None, *args: original(seed + by if isinstance(seed, int) else seed, *args)

    for owner, name in ((torch, "manual_seed"), (np.random, "seed"), (random, "seed")):
        events.replace(owner, name, other)
    events.imported_by_name()
