"""One trial: its runs, one for each seed, and their result. Gates run once for each structure, before its first trial."""

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainworthy.core.base.console import Console, last_line
from trainworthy.core.base.errors import DONE, GATE_FAILED, STOPPED_ITSELF, USAGE, UserError
from trainworthy.core.base.locks import held
from trainworthy.core.monitoring import cost
from trainworthy.core.report.advice import advise
from trainworthy.core.report.folder import read, read_json
from trainworthy.core.session import multi_seed, process_end
from trainworthy.core.sweep import diagnosis
from trainworthy.core.sweep import space as spaces
from trainworthy.core.sweep.study import wait_until_free


@dataclass
class Outcome:
    """Result of a trial. Without values it is infeasible; `reason` says why."""

    values: list[float] = field(default_factory=list)
    reason: str = ""
    kind: str = ""
    """gates, stopped or broken, of an infeasible trial."""
    diagnosis: str = ""
    seconds: float = 0.0
    cost: dict[str, Any] = field(default_factory=dict)
    """Of all its runs."""
    interrupted: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def gates_of(home: Path, recipe: str, fixed: list[str], built: dict[str, Any], console: Console) -> str:
    """Return the gate that this structure fails, or "". The first process runs the gates, others wait for its verdict. Searched
    numbers (rates, decays) stay at the preset's, so that no verdict depends on which trial came first."""
    key = "-".join(f"{k}={v}" for k, v in sorted(built.items())) or "as the preset"
    safe = "".join(c if c.isalnum() or c in "=.-" else "_" for c in key)[:100]
    path = home / "gates" / f"{safe}.json"
    with held(home / "gates" / f"{safe}.lock"):
        if (known := read_json(path)).get("structure") == built:
            return known["failed"]
        console.say(f"  gates  once for this structure: {key}")
        words = ["check", recipe, *fixed, *spaces.words(built), "--run.out", str(home / "gates")]
        done = subprocess.run([sys.executable, "-m", "trainworthy", *words], capture_output=True, text=True)
        if done.returncode not in (DONE, GATE_FAILED):
            got = f"exit {done.returncode}: {last_line(done.stdout + done.stderr)}"
            raise UserError(
                f"the gates for {key} ended without a verdict", got=got, next=f"trainworthy {' '.join(words)}"
            )
        failed = ""
        if done.returncode == GATE_FAILED:
            named = re.findall(r"\d+ of \d+ gates failed(?:, see first)?: (.+)", done.stdout + done.stderr)
            failed = named[-1].strip() if named else "a gate"
        path.write_text(json.dumps({"structure": built, "failed": failed}))
        return failed


def job(recipe: str, words: list[str], seed: int, folder: Path) -> multi_seed.Job:
    """Return the run of one seed. A run that was interrupted is resumed, or started again if it has no checkpoint."""
    one = multi_seed.job_of("run", {"recipe": recipe, "argv": words}, seed, folder)
    if (folder / "args.json").is_file():
        if process_end.newest(folder):
            one.command[3:] = ["resume", str(folder)]
        else:
            shutil.rmtree(folder)
    return one


def run(recipe: str, words: list[str], seeds: list[int], folder: Path, arrived: list[str]) -> Outcome:
    """Run every seed that has not finished, one at a time; return the result of all. `arrived`: names of signals, which end it."""
    jobs = []
    for seed in seeds:
        home = folder / f"seed-{seed}"
        wait_until_free(home, arrived)
        if not read_json(home / "summary.json").get("reported") and not arrived:  # a killed run may leave half a file
            jobs.append(job(recipe, words, seed, home))
    multi_seed.work(jobs, 1, arrived, Console(quiet=True), lambda job: "")
    refused = [j for j in jobs if j.code == USAGE and "resume" in j.command]
    if refused and not arrived:  # the code or the data changed since a killed worker began it: it is begun anew
        for one in refused:
            shutil.rmtree(one.folder)
        anew = [job(recipe, words, j.seed, j.folder) for j in refused]
        multi_seed.work(anew, 1, arrived, Console(quiet=True), lambda job: "")
        jobs = [j for j in jobs if j not in refused] + anew
    failed = [j for j in jobs if j.code != DONE]
    spent = [found for seed in seeds if (found := cost.of_run(folder / f"seed-{seed}"))]  # a seed may not have begun
    outcome = Outcome(seconds=sum(j.seconds for j in jobs), cost=cost.together(spent))
    if arrived or any((j.code or 0) < 0 or (j.code or 0) > STOPPED_ITSELF for j in failed):
        return Outcome(interrupted=True)
    if failed:
        first = failed[0]
        outcome.kind = {GATE_FAILED: "gates", STOPPED_ITSELF: "stopped"}.get(first.code or 0, "broken")
        outcome.reason = f"seed {first.seed}, exit {first.code}: {first.last_line()}"
        return outcome
    return measured(folder, seeds, outcome)


def measured(folder: Path, seeds: list[int], outcome: Outcome) -> Outcome:
    """The reported validation score of each seed, and what the curves of the first say."""
    for seed in seeds:
        summary = read_json(folder / f"seed-{seed}" / "summary.json")
        value = float(summary["reported"][summary["metric"]])
        if not math.isfinite(value):
            reason = f"seed {seed}: {summary['metric']} is {value}"
            return Outcome(kind="stopped", reason=reason, seconds=outcome.seconds, cost=outcome.cost)
        outcome.values.append(value)
    f = read(folder / f"seed-{seeds[0]}")
    first = advise(f.rows, f.summary, f.settings, f.n_val, own_samples=f.own_samples)[0]
    outcome.diagnosis = "; ".join([first.title, *diagnosis.faults(f)])
    return outcome


def test_score(folder: Path, seeds: list[int]) -> tuple[float, int] | None:
    """(mean over the seeds of the score on the test split, its samples) of the trial that was chosen; no other trial's is read."""
    found = [read_json(folder / f"seed-{seed}" / "summary.json") for seed in seeds]
    tested = [s["test"] for s in found if s.get("test")]
    if len(tested) < len(seeds):
        return None
    return statistics.fmean(t["metrics"][s["metric"]] for t, s in zip(tested, found, strict=True)), tested[0]["samples"]
