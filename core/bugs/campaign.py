"""Runs cases through the real command in parallel child processes, and stores each result in a journal, from which an interrupted
campaign continues."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import DONE, GATE_FAILED, INTERRUPTED, Interrupted, UserError
from trainworthy.core.bugs import mutation, suite
from trainworthy.core.bugs.mutation import Mutant
from trainworthy.core.bugs.outcomes import (
    Checked,
    Row,
    classify,
    first_gates,
    harm_rule,
    healthy_range,
    last,
    named,
    outcome,
    summary_line,
)
from trainworthy.core.bugs.suite import Case
from trainworthy.core.recipe.registry import find

QUICK = 1.5  # seconds: gates that take less on the recipe itself run before the others on a mutant
HEALTHY_SEEDS = (0, 1, 2, 3, 4)
MUTANT_SEEDS = (0, 1)


@dataclass
class Campaign:
    """Where results go, and how much runs at once."""

    home: Path
    jobs: int = 2
    settings: list[str] = field(default_factory=list)
    """Settings for every run and check, after those of the case."""
    say: Callable[[str], None] = print

    def __post_init__(self):
        try:
            self.home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the folder {self.home} cannot be written"
            raise UserError(what, got=error.strerror, next="--to FOLDER") from None
        self._lock, self._checking = threading.Lock(), threading.Lock()
        self.rows = read(self.home)
        self._children: set[subprocess.Popen] = set()
        self._stopping = self._starting = False

    def known(self, key: str) -> Row | None:
        return next((row for row in self.rows if row["key"] == key), None)

    def work(self, tasks: Iterable[tuple[str, Callable[[], Row]]]) -> None:
        """Run (key, function) pairs that the journal does not have, several at once, and note each result as it comes."""
        todo = [(key, run) for key, run in tasks if self.known(key) is None]
        if not todo:
            return
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                waiting = {pool.submit(run): key for key, run in todo}
                for n, done in enumerate(as_completed(waiting), 1):
                    self.note({"key": waiting[done], **done.result()})
                    self.say(f"  {n:>4} of {len(todo)}  {summary_line(self.rows[-1])}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise

    def note(self, row: Row) -> None:
        with self._lock, open(self.home / "journal.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
            self.rows.append(row)

    def stop(self) -> None:
        """Kill all children. No further one starts."""
        self._stopping = True
        for child in list(self._children):
            kill(child)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """End with one message at Ctrl-C or SIGTERM, and without children. Later signals are ignored: the first one already ends
        everything, and a second KeyboardInterrupt would leave a traceback."""
        handled = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def first(number: int, frame: object) -> None:
            for each in handled:
                signal.signal(each, signal.SIG_IGN)
            if self._starting:  # the child that starts in this thread is not known yet
                self._stopping = True
                return
            raise KeyboardInterrupt

        for number in handled:
            signal.signal(number, first)
        try:
            yield
        except KeyboardInterrupt:
            self.stop()
            raise Interrupted(f"interrupted: {len(self.rows)} results are kept in {self.home / 'journal.jsonl'}\n"
                              "  next:         run the same command again to continue", code=INTERRUPTED) from None  # fmt: skip
        for number, before in handled.items():
            signal.signal(number, before)

    def child(self, command: list[str], folder: Path, *, limit: float, **env: str) -> tuple[int, str]:
        """Run a command in `folder` on one thread; return its exit code (124 after `limit` seconds) and its output."""
        env = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **env}
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "output.log"
        mine = threading.current_thread() is threading.main_thread()
        self._starting |= mine
        try:
            with open(log, "a") as out:
                child = subprocess.Popen([sys.executable, "-m", *command], cwd=folder, stdout=out, stderr=subprocess.STDOUT,
                                         stdin=subprocess.DEVNULL, env=env, start_new_session=True)  # fmt: skip
            self._children.add(child)
        finally:  # or no later signal would end anything
            self._starting &= not mine
        try:
            if self._stopping:
                kill(child)
            if self._stopping and mine:
                raise KeyboardInterrupt
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            kill(child)
            child.wait()
            code = 124
        except KeyboardInterrupt:
            kill(child)
            raise
        finally:
            self._children.discard(child)
        return code, log.read_text(errors="replace")

    def check(self, file: Path, seed: int, argv: Iterable[str], only: Iterable[str] = ()) -> Checked:
        """`trainworthy check FILE` in the file's folder."""
        where = file.parent / f"check-{len(list(file.parent.glob('check-*')))}"
        words = ["--only", ",".join(only)] if only else []
        command = ["trainworthy", "check", str(file), "--run.seed", str(seed), *argv, *self.settings, *words]
        code, output = self.child(command, file.parent, limit=1800, TRAINWORTHY_FOLDER=str(where))
        path = where / "gates.json"
        return Checked(code, json.loads(path.read_text())["gates"] if path.is_file() else [], output)

    def short(
        self,
        folder: Path,
        recipes: list[str],
        seeds: Iterable[int],
        steps: int,
        *,
        trace: Iterable[str] = (),
        same_as: dict | None = None,
        healthy: tuple[float, float] | None = None,
        own: dict[str, Iterable[str]] | None = None,
        limit: float = 1800,
    ) -> dict[str, dict[str, Row]]:
        """Short runs without gates: {recipe: {seed: result}}. A recipe whose first seed ends in the range `healthy`, or in the very
        losses and metrics of `same_as`, runs at no further seed. `own`: further settings of a recipe. A process that ends without
        a result counts as a crash."""
        folder.mkdir(parents=True, exist_ok=True)
        job = folder / "short-run.json"
        job.write_text(json.dumps({"recipes": recipes, "seeds": list(seeds), "steps": steps, "trace": list(trace),
                                   "settings": self.settings, "own": {k: list(v) for k, v in (own or {}).items()},
                                   "same_as": same_as or {}, "healthy": healthy}))  # fmt: skip
        code, output = self.child(["trainworthy.core.bugs.short_run", str(job)], folder, limit=limit)
        result = job.with_suffix(".result.json")
        if result.is_file():
            return json.loads(result.read_text())
        why = f"no end within {limit:.0f} s" if code == 124 else f"exit {code}: {last(output)}"
        return {r: {"0": {"crashed": why, "losses": [], "metrics": {}, "stopped": ""}} for r in recipes}

    # ------------------------------------------------------------------------------- planted bugs and healthy variants

    def suite(self, found: list[Case], seeds: list[int]) -> None:
        pairs = [(c, seed) for seed in seeds for c in found]
        self.work((key(c, seed, self.settings), lambda c=c, seed=seed: self.one(c, seed)) for c, seed in pairs)

    def one(self, case: Case, seed: int) -> Row:
        folder, started = self.home / "work" / f"{case.recipe.replace('/', '-')}-{case.id}-{seed}", time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        suite.fork(case.recipe, folder / "fork.py", *([(case.old, case.new)] if case.old else []))
        row = {"recipe": case.recipe, "kind": case.kind, "case": case.id, "seed": seed, "commit": suite.commit(), "row": case.row,
               "gate": case.gate, "known": case.known}  # fmt: skip
        checked = self.check(folder / "fork.py", seed, case.argv, first_gates(case) if case.gate else ())
        if case.gate and checked.code == DONE:  # its own gate passes: does any other gate fail?
            checked = self.check(folder / "fork.py", seed, case.argv)
        row |= {"outcome": outcome(case.kind, checked.code), "first": checked.first, "note": checked.note,
                "named": bool(checked.failed) and named(case.words, checked.failed[0]),
                "seconds": round(time.monotonic() - started, 1)}  # fmt: skip
        if row["outcome"] in ("caught", "quiet"):
            shutil.rmtree(folder, ignore_errors=True)  # for other outcomes, keep the evidence
        return row

    # ------------------------------------------------------------------------------------------------------- mutants

    def mutants(self, recipe: str, n: int | None, steps: int, helpers: list[Path], parts: tuple[str, ...]) -> Row:
        """Run a sample of the mutants of a recipe; return how many places there are."""
        source = find(recipe).path
        files = [source, *helpers]
        mark = f"{suite.commit()} {recipe} {steps} {' '.join([*self.settings, *map(str, helpers)])}"
        reference = self.reference(recipe, steps, [str(f.resolve()) for f in files], mark)
        every = [m for f in files for m in mutation.mutants(f.resolve(), parts, helper=f != source)]
        executed = mutation.reached(every, reference["lines"])
        drawn = mutation.drawn(executed)[:n]
        counts = f"{len(every)} mutants, {len(executed)} in lines that {steps} steps execute; {len(drawn)} of them run"
        self.say(f"{recipe}: {counts}")
        self.say(f"  healthy {reference['metric']} after {steps} steps: "
                 + ", ".join(f"{v:.4g}" for v in reference["values"]) + f"; harm is {harm_rule(reference)}")  # fmt: skip
        each = "a mutant takes one or two of them, a harmful one also its gates"
        self.say(f"  a short run took {reference['seconds']:.0f} s: {each}")
        keys = {f"{mark} mutants {m.id}": m for m in drawn}
        self.work((k, lambda m=m: self.mutant(recipe, m, steps, reference)) for k, m in keys.items())
        return {"recipe": recipe, "found": len(every), "executed": len(executed), "run": len(drawn), "steps": steps,
                "metric": reference["metric"], "healthy": reference["values"], "rule": harm_rule(reference), "keys": sorted(keys)}  # fmt: skip

    def reference(self, recipe: str, steps: int, trace: list[str], mark: str) -> Row:
        """Return what the recipe itself does in short runs; computed once for each commit and setting."""
        if (kept := self.known(f"{mark} reference")) is not None:
            return kept
        folder = self.home / "work" / f"{find(recipe).id.replace('/', '-')}-reference"
        shutil.rmtree(folder, ignore_errors=True)
        target = recipe if not recipe.endswith(".py") else str(Path(recipe).resolve())
        self.say(f"{recipe}: healthy runs of {steps} steps at {len(HEALTHY_SEEDS)} seeds")
        started = time.monotonic()
        found = self.short(folder, [target], HEALTHY_SEEDS, steps, trace=trace)[target]
        wrong = next((r["crashed"] or r["stopped"] for r in found.values() if r["crashed"] or r["stopped"]), "")
        if wrong:
            raise UserError(f"{recipe} itself does not get through {steps} steps", got=wrong, needed="a recipe that runs",
                            cause=f"the log is {folder / 'output.log'}")  # fmt: skip
        first = found[str(HEALTHY_SEEDS[0])]
        name = first["metric"]
        row = {"key": f"{mark} reference", "kind": "reference", "recipe": recipe, "commit": suite.commit(), "metric": name,
               "higher": first["higher_is_better"], "floor": first["floor"], "ceiling": first["ceiling"],
               "values": [r["metrics"][name] for r in found.values()], "lines": first["lines"],
               "seconds": round((time.monotonic() - started) / len(found), 1),
               "first": {k: first[k] for k in ("losses", "metrics", "weights")}}  # fmt: skip
        self.note(row)
        return row

    def quick_gates(self, recipe: str) -> dict[str, Any]:
        """Check the recipe itself: {"reads": {gate: parts}, "quick": gates that take little time}."""
        if (kept := self.known(f"{suite.commit()} {recipe} {self.settings} gates")) is not None:
            return kept
        folder = self.home / "work" / f"{find(recipe).id.replace('/', '-')}-gates"
        shutil.rmtree(folder, ignore_errors=True)
        suite.fork(recipe, folder / "fork.py")
        self.say("  the first harmful mutant: gates run on the recipe itself, once, to see which are quick")
        checked = self.check(folder / "fork.py", 0, ())
        if checked.code != DONE:
            raise UserError(f"the gates do not pass {recipe} itself, so they say nothing of its mutants", got=checked.note or
                            last(checked.output), needed="a recipe whose `trainworthy check` passes",
                            next=f"trainworthy check {recipe} {' '.join(self.settings)}".strip())  # fmt: skip
        row = {"key": f"{suite.commit()} {recipe} {self.settings} gates", "kind": "gates", "commit": suite.commit(),
               "reads": {v["id"]: v["reads"] for v in checked.verdicts},
               "quick": [v["id"] for v in checked.verdicts if v["seconds"] < QUICK]}  # fmt: skip
        self.note(row)
        return row

    def mutant(self, recipe: str, m: Mutant, steps: int, reference: Row) -> Row:
        """Decide what a mutant is: crashed, equal, harmless, stopped by a gate, or a survivor."""
        folder, started = self.home / "work" / f"{find(recipe).id.replace('/', '-')}-{m.id}", time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        file = mutated(recipe, m, folder)
        row = {"recipe": recipe, "kind": "mutants", "case": m.id, "seed": 0, "commit": suite.commit(), "part": m.part,
               "mutation": m.kind, "file": m.file.name, "line": m.line, "patch": m.patch(m.file.read_text()), "first": "",
               "note": "", "row": ""}  # fmt: skip
        ran = self.short(folder, [str(file)], MUTANT_SEEDS, steps, same_as=reference["first"],
                         healthy=healthy_range(reference), limit=900)[str(file)]  # fmt: skip
        row["outcome"], row["note"] = classify(list(ran.values()), reference, m.part)
        if row["outcome"] == "harmful":
            row["harm"] = row.pop("note")
            with self._checking:  # the first thread that needs them runs them
                known = self.quick_gates(recipe)
            own = [g for g, parts in known["reads"].items() if m.part in (*parts, mutation.HELPER)]
            soon = [g for g in own if g in known["quick"]]
            rest = [g for g in known["reads"] if g not in soon]
            checked = None
            for only in filter(None, (soon, rest)):
                checked = self.check(file, 0, (), only)
                if checked.code != DONE:
                    break
            row |= {"first": checked.first, "note": checked.note,
                    "outcome": {DONE: "survived", GATE_FAILED: "stopped"}.get(checked.code, "crashed")}  # fmt: skip
        row["seconds"] = round(time.monotonic() - started, 1)
        if row["outcome"] != "survived":
            shutil.rmtree(folder, ignore_errors=True)
        return row


def kill(child: subprocess.Popen) -> None:
    """Kill a child and what it started. It is the leader of a group of its own, which Ctrl-C at the terminal does not reach."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def key(case: Case, seed: int, settings: list[str]) -> str:
    """Return what a result is kept under: commit, case and seed."""
    return " ".join([suite.commit(), case.recipe, case.kind, case.id, str(seed), *settings])


def read(home: Path) -> list[Row]:
    """Return the rows of a folder's journal. A last line that was cut off is left out."""
    path, rows = home / "journal.jsonl", []
    if path.is_file():
        for text in path.read_text().splitlines():
            try:
                rows.append(json.loads(text))
            except ValueError:
                continue
    return rows


def mutated(recipe: str, m: Mutant, folder: Path) -> Path:
    """Write a fork with the mutation. A mutated helper module is next to it and takes the place of the original."""
    source = find(recipe).path.read_text()
    file, changed = folder / "fork.py", m.applied(m.file.read_text())
    if m.file == find(recipe).path.resolve():
        suite.written(file, changed, recipe, source)
        return file
    parents = [p for p in m.file.parents if p.name in ("recipes", "core")]
    if not parents:
        raise UserError(f"{m.file} is no module of recipes/", needed="a helper module of the recipe")
    name = ".".join(("trainworthy", *m.file.relative_to(parents[-1].parent).with_suffix("").parts))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / m.file.name).write_text(changed)
    suite.written(file, PREAMBLE.format(name=name, path=str(folder / m.file.name)) + source, recipe, source)
    return file


PREAMBLE = """import importlib.util as _util, sys as _sys
import importlib as _importlib
_name = {name!r}
_spec = _util.spec_from_file_location(_name, {path!r})
_sys.modules[_name] = _util.module_from_spec(_spec)
_spec.loader.exec_module(_sys.modules[_name])
setattr(_importlib.import_module(_name.rpartition(".")[0]), _name.rpartition(".")[2], _sys.modules[_name])

"""
