"""Runs one recipe under several seeds in parallel: `run --seeds`, `check --seeds`."""

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trainworthy.core.base import config, interrupts, masking, settings_check
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import DONE, INTERRUPTED, SIGNALS, Interrupted, UserError
from trainworthy.core.base.files import stamp, write_whole
from trainworthy.core.base.machine import cores
from trainworthy.core.monitoring import board
from trainworthy.core.recipe import loading
from trainworthy.core.report.groups import NAME, as_text, last_words, plan_of
from trainworthy.core.report.seeds import write
from trainworthy.core.session import on_end


@dataclass
class Job:
    """One seed: its run folder, its log, and the command that starts or resumes it."""

    seed: int
    folder: Path
    command: list[str]
    code: int | None = None
    seconds: float = 0.0
    place: str = ""
    """Its accelerators, as CUDA_VISIBLE_DEVICES; empty: those of this process."""

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def last_line(self) -> str:
        """The newest line of its log; of an error, its cause and not its next step."""
        return last_words(self.log) or "starting"


def run(argv: list[str], given: str, *, with_board: bool, found: dict[str, Any]) -> None:
    """Run `trainworthy run RECIPE --seeds 5` (or 0,1,2): a group folder with a run folder per seed. Exits with the
    worst code. The content of the group's page is put into `found`."""
    plan, home = planned("run", argv, given)
    folder = home / f"seeds-{stamp()}"
    made(folder)
    write_whole(folder / NAME, json.dumps({**plan, "argv": masking.words(plan["argv"])}, indent=1))
    _run(folder, plan, force=False, with_board=with_board, found=found)


def take_seeds(argv: list[str]) -> tuple[list[str], str | None]:
    """Return `argv` without `--seeds VALUE`, and the value; raises for several words (`--seeds 0 1`)."""
    rest, given = config.take(argv, "--seeds")
    at = argv.index("--seeds") + 1 if "--seeds" in argv else len(argv)
    words = list(itertools.takewhile(str.isdigit, argv[at:]))
    if len(words) > 1:
        raise UserError("--seeds needs one word", got=f"--seeds {' '.join(words)}", needed="a number of seeds, or seeds with commas",
                        next=f"--seeds {','.join(words)}")  # fmt: skip
    return rest, given


def planned(verb: str, argv: list[str], given: str, own: tuple[str, ...] = ()) -> tuple[dict[str, Any], Path]:
    """Return the common settings of all seeds, and the folder of the recipe's runs. Invalid settings raise here, once.
    `given`: value of --seeds; `own`: words of the command that are no settings."""
    rest, n = config.take(argv, "-n")
    rest, file = config.take(rest, "--accelerate-config")
    launcher = [w for flag, value in (("-n", n), ("--accelerate-config", file)) if value for w in (flag, value)]
    if not rest:
        raise UserError(f"{verb} what?", next=f"trainworthy {verb} vision/classify --seeds {given}")
    loaded = loading.load(rest[0])
    cfg, _ = config.parse(loaded.module, rest[1:], prog=f"trainworthy {verb} {rest[0]}")
    settings_check.check_values(cfg, processes=int(n or 1))
    rest, _ = config.take(rest, "--run.seed")
    threads = (cfg.run.threads or torch.get_num_threads()) * max(int(n or 1), cfg.gates.jobs)
    plan = {"recipe": loaded.target, "argv": [*rest[1:], *own, *launcher], "seeds": _seeds(given, cfg.run.seed)}
    plan["each"] = int(n or 1)
    plan["at_once"] = len(devices(plan["each"])) or max(1, cores().allowed // threads)
    return plan, cfg.run.out / loaded.slug


def devices(each: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each seed that runs at the same time, with `each` accelerators; an empty list on a CPU."""
    count = torch.cuda.device_count() if each else 0
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name][:count]
    known = named or [str(i) for i in range(count)]
    return [",".join(known[i : i + each]) for i in range(0, max(1, count - each + 1), each)] if count else []


def made(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be written", got=error.strerror,
                        next="choose another place with --run.out FOLDER") from None  # fmt: skip


def job_of(verb: str, plan: dict[str, Any], seed: int, folder: Path) -> Job:
    words = [verb, plan["recipe"], *plan["argv"], "--run.seed", str(seed)]
    return Job(seed, folder, [sys.executable, "-m", "trainworthy", *words])


def title(plan: dict[str, Any], folder: Path) -> str:
    seeds = ", ".join(map(str, plan["seeds"]))
    return f"{plan['recipe']} · seeds {seeds} · {plan['at_once']} in parallel, into {folder}"


def worst(jobs: list[Job]) -> int:
    return max((j.code if j.code >= 0 else 128 - j.code for j in jobs), default=DONE)


def resume(folder: Path, *, force: bool, given: dict[str, str], with_board: bool, found: dict[str, Any]) -> None:
    """Continue every unfinished seed of a group. `given`: secrets, which its files do not hold."""
    plan = plan_of(folder)
    plan["argv"] = masking.filled(plan["argv"], given, where=str(folder / NAME), command=f"trainworthy resume {folder}")
    more = [w for name, v in given.items() for w in (masking.flag(name), v)]
    _run(folder, plan, force=force, more=more, with_board=with_board, found=found)


def _seeds(given: str, first: int) -> list[int]:
    """5 -> five seeds from `first` on; 0,1,2 -> these."""
    words = given.split(",")
    if not all(w.strip().isdigit() for w in words):
        raise UserError("--seeds needs a number of seeds, or the seeds", got=given, needed="--seeds 5 or --seeds 0,1,2")
    seeds = [int(w) for w in words] if len(words) > 1 else list(range(first, first + int(given)))
    if len(set(seeds)) < max(2, len(seeds)):
        raise UserError("--seeds needs several different seeds", got=given, needed="two or more",
                        cause="one seed cannot show the spread; omit --seeds to run one seed")  # fmt: skip
    return seeds


def _run(
    folder: Path, plan: dict[str, Any], *, force: bool, more: Sequence[str] = (), with_board: bool,
    found: dict[str, Any],
) -> None:  # fmt: skip
    """Run every unfinished seed, as many in parallel as planned; then write table, card and report."""
    jobs = []
    for seed in plan["seeds"]:
        job = job_of("run", plan, seed, folder / f"seed-{seed}")
        if (job.folder / "args.json").is_file():
            job.command[3:] = ["resume", str(job.folder), *(["--force"] if force else []), *more]
        if not (job.folder / "summary.json").is_file():
            jobs.append(job)
    console = Console()
    console.say(title(plan, folder))
    on_end.run_folder(folder)
    served = board.during_run(folder, wanted=with_board, say=console.say)
    with signals() as arrived, served as board_is_up:
        board_is_up()
        work(jobs, plan["at_once"], arrived, console, _ended, each=plan.get("each", 0))
    group = write(folder)
    found |= {"run": str(folder), **group}
    result = as_text(group) if group["values"] else f"no seed of {len(plan['seeds'])} has a score"
    console.say(f"\n{result}\n\nreport {folder / 'report.html'}\ncard   {folder / 'card.md'}")
    if len(group["values"]) > 1:
        console.say(f"next   trainworthy compare {folder} OTHER, a group with other settings")
    elif not group["values"] and not arrived:
        console.say(f"next   mend what stopped them, then: trainworthy resume {folder}")
    if arrived:
        saved = any(folder.glob("seed-*/checkpoints/*/step-*/manifest.json"))
        raise Interrupted(f"{arrived[0]}: every seed was stopped\n  next:         trainworthy resume {folder}",
                          code=INTERRUPTED if saved else 128 + signal.Signals[arrived[0]])  # fmt: skip
    sys.exit(worst(jobs))


def work(
    jobs: list[Job], at_once: int, arrived: list[str], console: Console, ended: Callable[[Job], str], each: int = 0
) -> None:
    """Start and watch the jobs; a failed seed does not stop the others. `arrived`: names of signals. `ended` returns the line
    of a finished job. `each`: accelerators of a job; 0: they share them."""
    waiting, running, forwarded = list(jobs), {}, False
    free = devices(each)[:at_once] or [""] * at_once
    with contextlib.ExitStack() as stack:
        live = None
        if sys.stdout.isatty():
            from rich.live import Live

            live = stack.enter_context(Live(transient=True, refresh_per_second=4))
        while running or (waiting and not arrived):
            while waiting and free and not arrived:
                job = waiting.pop(0)
                job.place = free.pop(0)
                running[job.seed] = (job, _start(job), time.monotonic())
            if arrived and not forwarded:
                forwarded = True
                for _, child, _ in running.values():
                    child.send_signal(signal.SIGINT)
            for job, child, since in list(running.values()):
                if child.poll() is not None:
                    job.code, job.seconds = child.returncode, time.monotonic() - since
                    del running[job.seed]
                    free.append(job.place)
                    (live.console.print if live else console.say)(ended(job))
            if live:
                live.update("\n".join(f"  seed {s}  {j.last_line()}" for s, (j, *_) in running.items()))
            time.sleep(0.1)
    for job in waiting:
        job.code = 5


def _start(job: Job) -> subprocess.Popen:
    """Start a job with its output in its log, in its own session, so that we forward Ctrl-C to it once."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ, PYTHONSAFEPATH="1", TRAINWORTHY_FOLDER=str(job.folder))
    env |= {"CUDA_VISIBLE_DEVICES": job.place} if job.place else {}
    with open(job.log, "a") as log:
        return subprocess.Popen(job.command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def _ended(job: Job) -> str:
    if job.code == DONE:
        s = json.loads((job.folder / "summary.json").read_text())
        return f"  seed {job.seed}  {s['metric']} {s['reported'][s['metric']]:.4f}  [{job.seconds:.0f} s]"
    return stopped(job)


def stopped(job: Job) -> str:
    """Return the line of a seed that failed, with the path of its log."""
    return f"  seed {job.seed}  exit {job.code}: {job.last_line()}\n           look at it: tail -n 30 {shlex.quote(str(job.log))}"


@contextlib.contextmanager
def signals() -> Iterator[list[str]]:
    """Collect the names of arriving signals; `work` forwards them."""
    arrived: list[str] = []
    with interrupts.handled(arrived.append, [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]):  # nohup
        yield arrived
