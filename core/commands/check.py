"""usage: trainworthy check RECIPE [--seeds 5] [--only ID,...] [--stage NAME] [--deep] [settings]

Runs the gates without training.

  trainworthy check vision/classify                     every gate, in the order of a run
  trainworthy check ./mine.py --only overfit,resume     some gates; `own`: those outside core's standard list
  trainworthy check vlm/instruct --stage align          the gates of one stage
  trainworthy check ./mine.py --deep                    resume and accumulation in new processes, all data scanned
  trainworthy check ./mine.py --gates.jobs 4            four gates at a time, in processes of their own
  trainworthy check ./mine.py --seeds 5                 five seeds in parallel: which gates fail at which seed
  trainworthy check ./mine.py --json                    folder and verdicts as JSON, also if a gate fails
  trainworthy check ./train.py                          not a recipe: a file with a function factory() that builds
                                                        a Script, a Loop or a Trainer (--only, --waive, --because, --seed, --out)

The command never reuses remembered passes. Each seed of `--seeds` has its own folder under runs/<recipe>/checks/, with
gates.json and report.html. Several seeds show false alarms and misses that a single seed cannot show.
`trainworthy check RECIPE --help` shows every setting. Exit codes: 0 passed, 2 bad usage or data, 3 a gate failed."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import DONE, GATE_FAILED, Interrupted
from trainworthy.core.base.files import read_json, stamp
from trainworthy.core.commands import open_recipe, prints_json, take_flag
from trainworthy.core.report.plain import verdicts_of
from trainworthy.core.session import gate_processes, multi_seed
from trainworthy.core.session.checking import check_stages
from trainworthy.core.session.session import Interrupts, open_session, reported, session_lock, write_start


@prints_json
def main(argv: list[str], found: dict[str, Any]) -> None:
    """Check one seed or several, without remembered verdicts; put folder and verdicts into `found`."""
    argv, given = multi_seed.take_seeds(argv)
    if given is not None:
        seeds(argv, given, found)
    rest, only = config.take(argv, "--only")
    rest, stage = config.take(rest, "--stage")
    rest, deep = take_flag(rest, "--deep")
    loaded, cfg, preset = open_recipe("check", rest)
    chosen = tuple((only or "").replace(",", " ").split())
    name = os.environ.pop("TRAINWORTHY_FOLDER", None)
    folder = Path(name) if name else None
    session = open_session(loaded, cfg, preset, rest, kind="checks", only=chosen, folder=folder)
    page = contextlib.nullcontext() if gate_processes.is_helper() else reported(session)
    with session_lock(session), Interrupts().handled(), page:
        write_start(session)
        try:
            check_stages(session, only=chosen, deep=deep, stage=stage or "")
        finally:
            found |= verdicts_of(session.folder)
    session.console.say(f"  evidence in {session.folder}/gates.json and report.html")


def seeds(argv: list[str], given: str, found: dict[str, Any]) -> None:
    """Check every seed, as many in parallel as there are cores for, then summarise each gate over the seeds. Exits with
    the worst code."""
    rest, deep = take_flag(argv, "--deep")
    own = ["--deep"] * deep
    for flag in ("--only", "--stage"):
        rest, value = config.take(rest, flag)
        own += [flag, value] if value else []
    plan, runs = multi_seed.planned("check", rest, given, tuple(own))
    home, name = runs / "checks", stamp()
    multi_seed.made(home)
    jobs = [multi_seed.job_of("check", plan, seed, home / f"{name}-seed-{seed}") for seed in plan["seeds"]]
    console = Console()
    console.say(multi_seed.title(plan, home))
    with multi_seed.signals() as arrived:
        multi_seed.work(jobs, plan["at_once"], arrived, console, ended, each=plan["each"])
    found["seeds"] = {job.seed: {"exit_code": job.code, **verdicts_of(job.folder)} for job in jobs}
    console.say("\n" + together({job.seed: verdicts(job) for job in jobs}))
    if arrived:
        message = f"{arrived[0]}: every seed was stopped\n  next:         the same command again, from the start"
        raise Interrupted(message, code=128 + signal.Signals[arrived[0]])
    sys.exit(multi_seed.worst(jobs))


def verdicts(job: multi_seed.Job) -> list[dict[str, Any]]:
    """Return the rows of a seed's gates.json; none if the check ended before it was written."""
    return read_json(job.folder / "gates.json").get("gates", [])


def ended(job: multi_seed.Job) -> str:
    if job.code not in (DONE, GATE_FAILED):
        return multi_seed.stopped(job)
    found = [v["verdict"] for v in verdicts(job)]
    failed = f", {found.count('fail')} failed: {job.folder / 'report.html'}" if "fail" in found else ""
    return f"  seed {job.seed}  {found.count('pass')} of {len(found)} gates passed{failed}  [{job.seconds:.0f} s]"


def together(found: dict[int, list[dict[str, Any]]]) -> str:
    """Return each gate that failed, with seeds and measurements, then how many gates passed at every seed."""
    gates: dict[str, dict[int, dict]] = {}
    for seed, rows in found.items():
        for row in rows:
            name = f"{row['stage']} {row['id']}" if len({r["stage"] for r in rows}) > 1 else row["id"]
            gates.setdefault(name, {})[seed] = row
    lines = []
    for name, rows in gates.items():
        failed = {seed: row for seed, row in rows.items() if row["verdict"] == "fail"}
        if failed:
            first = next(iter(failed.values()))
            lines.append(f"  FAIL   {name} ({first['rows']}) at {len(failed)} of {len(rows)} seeds")
            lines += [f"         seed {seed:<8} {row['measured']}" for seed, row in failed.items()]
            lines.append(f"         needed        {first['needed']}")
    kinds = [{row["verdict"] for row in rows.values()} for rows in gates.values()]
    passed, skipped = (kinds.count({kind}) for kind in ("pass", "skip"))
    finished = sum(bool(rows) for rows in found.values())
    lines.append(f"{passed} of {len(gates)} gates passed at each of {finished} seeds, {skipped} skipped at each")
    return "\n".join(lines)
