"""trainworthy check RECIPE [--seeds 5] [--only ID,...] [--stage NAME] [--deep] [settings]: the gates alone, always proved afresh.

  trainworthy check vision/classify                     every gate, in the order in which a run proves them
  trainworthy check ./mine.py --only overfit,resume     some of them
  trainworthy check vlm/instruct --stage align          those of one stage
  trainworthy check ./mine.py --deep                    resume and accumulation in new processes, all data scanned
  trainworthy check ./mine.py --seeds 5                 five seeds side by side: which gate spoke at which?

Each seed of `--seeds` has a folder of its own under runs/<recipe>/checks/, with gates.json and report.html. A healthy recipe
that fails at one seed of five has met a false alarm, a broken one that passes at one a miss: a single seed shows neither.
`trainworthy check RECIPE --help` shows every setting. Exit codes: 0 passed, 2 bad usage or data, 3 a gate failed."""

import json
import secrets
import signal
import sys
import time
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import DONE, GATE_FAILED, Interrupted
from trainworthy.core.session import multi_seed

OWN = ("--only", "--stage")  # with a value; --deep has none


def seeds(argv: list[str], asked: str) -> None:
    """Every seed's check, as many side by side as there are cores for; then each gate over all. Exits with the worst code."""
    own = ["--deep"] if "--deep" in argv else []
    rest = [word for word in argv if word != "--deep"]
    for flag in OWN:
        rest, value = config.take(rest, flag)
        own += [flag, value] if value else []
    plan, runs = multi_seed.planned("check", rest, asked, tuple(own))
    home, stamp = runs / "checks", f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    multi_seed.made(home)
    jobs = [multi_seed.job_of("check", plan, seed, home / f"{stamp}-seed-{seed}") for seed in plan["seeds"]]
    console = Console()
    console.say(multi_seed.title(plan, home))
    with multi_seed.signals() as arrived:
        multi_seed.work(jobs, plan["at_once"], arrived, console, ended)
    console.say("\n" + together({job.seed: verdicts(job) for job in jobs}))
    if arrived:
        raise Interrupted(
            f"{arrived[0]}: every seed was stopped\n  next:         the same command again, from the start",
            code=128 + signal.Signals[arrived[0]],
        )
    sys.exit(multi_seed.worst(jobs))


def verdicts(job: multi_seed.Job) -> list[dict[str, Any]]:
    """The rows of a seed's gates.json; none where it did not get so far."""
    path = job.folder / "gates.json"
    return json.loads(path.read_text())["gates"] if path.is_file() else []


def ended(job: multi_seed.Job) -> str:
    """The line of a seed whose gates have spoken."""
    if job.code not in (DONE, GATE_FAILED):
        return multi_seed.stopped(job)
    found = [v["verdict"] for v in verdicts(job)]
    failed = f", {found.count('fail')} failed: {job.folder / 'report.html'}" if "fail" in found else ""
    return f"  seed {job.seed}  {found.count('pass')} of {len(found)} gates passed{failed}  [{job.seconds:.0f} s]"


def together(found: dict[int, list[dict[str, Any]]]) -> str:
    """Each gate that failed, at which seeds and with what numbers; then how many passed at all of them."""
    gates: dict[str, dict[int, dict]] = {}
    for seed, rows in found.items():
        for row in rows:
            name = f"{row['stage']} {row['id']}" if len({r["stage"] for r in rows}) > 1 else row["id"]
            gates.setdefault(name, {})[seed] = row
    lines = []
    for name, rows in gates.items():
        failed = {seed: row for seed, row in rows.items() if row["verdict"] == "fail"}
        if failed:
            lines.append(
                f"  FAIL   {name} ({next(iter(failed.values()))['rows']}) at {len(failed)} of {len(rows)} seeds"
            )
            lines += [f"         seed {seed:<8} {row['measured']}" for seed, row in failed.items()]
            lines.append(f"         needed        {next(iter(failed.values()))['needed']}")
    said = [{row["verdict"] for row in rows.values()} for rows in gates.values()]
    passed, skipped = (sum(words == {word} for words in said) for word in ("pass", "skip"))
    spoke = sum(bool(rows) for rows in found.values())
    lines.append(f"{passed} of {len(gates)} gates passed at each of {spoke} seeds, {skipped} skipped at each")
    return "\n".join(lines)
