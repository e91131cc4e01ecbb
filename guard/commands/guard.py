"""usage: trainworthy guard SCRIPT.py [-- its arguments]

Rehearses any training script, unchanged, before it runs.

  trainworthy guard train.py -- --batch-size 64      everything after -- goes to the script
  trainworthy guard -m pkg.train -- --lr 0.1         a module, as python -m would start it
  trainworthy guard train.py --only modes,schedule   some of the checks
  trainworthy guard train.py --waive samples --because "two scans of one form"

  --steps 40            optimiser steps of a rehearsal (more if they take less than --seconds)
  --seconds 6           minimum training time of a rehearsal; the maximum is ten times that, and at least a minute
  --load-seconds 600    time limit until the script's first step
  --batches NAME        the script's function that returns a batch, if it uses no DataLoader
  --nproc 1             processes that train together, as torchrun --nproc_per_node would start them
  --restart ARGUMENTS   what starts the script again from a checkpoint: --restart "--resume {checkpoint}" (or {folder})
  --seed 0              seed of torch, numpy and random, until the script sets its own
  --no-interventions    only observe; do not rehearse on eight samples
  --out FOLDER          folder for results (default runs/guard-<script>/<time>)
  --json                folder and verdicts as JSON

Under a launcher: accelerate launch -m trainworthy.guard train.py, torchrun --nproc_per_node 2 -m trainworthy.guard train.py.
The script runs in child processes that stop by themselves. Its output files go to a temporary folder; trackers are disabled.
Exit codes: 0 passed, 2 the script cannot be rehearsed, 3 a check failed."""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainworthy.core.base.as_json import results
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import GATE_FAILED, UserError
from trainworthy.core.base.files import stamp
from trainworthy.core.commands import take_flag

FLAGS = {"--only": "", "--waive": "", "--because": "", "--steps": "40", "--seconds": "6", "--load-seconds": "600",
         "--batches": "", "--out": "", "--nproc": "1", "--restart": "", "--seed": "0"}  # fmt: skip


@dataclass
class Options:
    """The guard's own options, and the words that belong to the script."""

    values: dict[str, str]
    interventions: bool
    words: list[str] = field(default_factory=list)


def options(argv: list[str]) -> Options:
    """Parse the guard's own flags, up to the script's arguments."""
    own, after = (argv, []) if "--" not in argv else (argv[: argv.index("--")], argv[argv.index("--") :])
    found, words, interventions = dict(FLAGS), [], True
    i = 0
    while i < len(own):
        word, equals, value = own[i].partition("=")
        if word == "--no-interventions":
            interventions = False
        elif word in FLAGS:
            if not equals and i + 1 >= len(own):
                raise UserError(f"{word} needs a value", next="trainworthy guard --help")
            found[word] = value if equals else own[i + 1]
            i += not equals
        elif word == "-m":
            words += own[i : i + 2]
            i += 1
        elif word.startswith("-") and not words:
            needed = "the script's own arguments after --"
            raise UserError(f"unknown option {word}", needed=needed, next="trainworthy guard --help")
        else:
            words.append(own[i])
        i += 1
    for flag in ("--steps", "--seconds", "--load-seconds"):
        if not found[flag].replace(".", "", 1).isdigit() or float(found[flag]) <= 0:
            raise UserError(f"{flag} needs a number", got=found[flag], needed="more than 0")
    if not found["--seed"].isdigit():
        raise UserError("--seed needs a whole number", got=found["--seed"], needed="0 or more")
    if not found["--nproc"].isdigit() or not 0 < int(found["--nproc"]) <= 64:
        raise UserError("--nproc needs a number of processes", got=found["--nproc"], needed="1 to 64")
    extra = words[2:] if words[:1] == ["-m"] else words[1:]
    if extra:
        again = f"trainworthy guard {words[0]} -- {' '.join(extra)}"
        raise UserError("put the script's own arguments after --", got=" ".join(extra), next=again)
    return Options(found, interventions, words + after)


LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
             "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME")  # fmt: skip


def launched(values: dict[str, str]) -> bool:
    """Under torchrun or accelerate launch: rank 0 rehearses as many processes as there are, the others have nothing to
    do. Returns whether this process guards."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1 and os.environ.get("LOCAL_WORLD_SIZE", str(world)) != str(world):
        if rank:
            return False
        raise UserError(
            "guard rehearses on one machine", got=f"{world} processes on several",
            next="trainworthy guard --nproc 2 train.py, on one of them",
        )  # fmt: skip
    if world > 1 and values["--nproc"] not in ("1", str(world)):
        raise UserError(f"--nproc {values['--nproc']} and a launcher of {world} processes", next="leave --nproc out")
    if world > 1:
        values["--nproc"] = str(world)
    for name in [n for n in os.environ if n in LAUNCHERS or n.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    return rank == 0


def main(argv: list[str]) -> None:
    """Entry point of `trainworthy guard`."""
    end = argv.index("--") if "--" in argv else len(argv)
    own, as_json = take_flag(argv[1:end], "--json")
    with results(as_json) as found:
        run([*own, *argv[end:]], found)


def run(argv: list[str], found: dict[str, Any]) -> None:
    """Rehearse the script; put folder and verdicts into `found`."""
    own = options(argv)
    if not launched(own.values):
        return
    from trainworthy.guard.rehearsals import rehearsal

    target = rehearsal.locate(own.words)
    if own.values["--batches"]:
        target.batches = (*target.batches, *own.values["--batches"].split(","))
    console = Console()
    name = target.module or target.path.stem
    out = Path(own.values["--out"] or Path("runs") / f"guard-{name.rpartition('.')[2]}" / stamp())
    console.say(f"guard  {target.path.name} {' '.join(target.argv)}".rstrip())
    work = Path(tempfile.mkdtemp(prefix="tw-"))
    try:
        from trainworthy.core.report.plain import verdicts_of
        from trainworthy.guard.verdicts import Guard

        verdicts = Guard(target, own.values, own.interventions, console, work, out.absolute()).run()
        found |= verdicts_of(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if any(v.blocks for v in verdicts):
        sys.stdout.flush()
        sys.exit(GATE_FAILED)
