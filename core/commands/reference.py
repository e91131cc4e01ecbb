"""`trainworthy reference`: measures the band of a recipe's healthy runs and stores it next to the recipe."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import DONE, UserError
from trainworthy.core.base.machine import cores
from trainworthy.core.commands import argument_parser
from trainworthy.core.commands.help import PAGES
from trainworthy.core.recipe.registry import find


def main(argv: list[str]) -> None:
    parser = argument_parser(PAGES["reference"])
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=cores().allowed)
    parser.add_argument("--to", type=Path)
    args, settings = parser.parse_known_args(argv[1:])
    if args.seeds < 3:
        raise UserError("a band needs more runs", got=f"--seeds {args.seeds}", needed="3 or more")
    target = args.to or find(args.recipe).reference
    from trainworthy.core.report.bands import reference
    from trainworthy.core.report.folder import read

    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(args.at_once) as pool:
        folders = []
        runs = pool.map(lambda n: run_seed(args.recipe, n, settings, Path(out) / str(n)), range(args.seeds))
        for seed, folder in enumerate(runs):
            folders.append(read(folder))
            s = folders[-1].summary
            print(f"seed {seed}: {s['metric']} {s['reported'][s['metric']]:.4f}", flush=True)
        kept = reference(folders)
    write(target, kept)
    print(f"{target}: the band of {args.seeds} healthy runs")
    place = find(args.recipe).reference
    next_step = (
        shlex.join(["trainworthy", "run", args.recipe, *settings]) + "  (its report compares the run with the band)"
    )
    copied = target.absolute() == place.absolute()
    print(
        "next   "
        + (next_step if copied else f"cp {shlex.quote(str(target))} {shlex.quote(str(place))}, then: {next_step}")
    )


def write(target: Path, kept: dict[str, Any]) -> None:
    """Write a band to its file, one line for each curve."""
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in kept.items() if k != "bands")
    bands = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in kept["bands"].items())
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f'{{\n{lines},\n "bands": {{\n{bands}\n }}\n}}\n')


def run_seed(recipe: str, seed: int, settings: list[str], out: Path) -> Path:
    """Run one seed through the real command in its own process; return the run folder."""
    command = [sys.executable, "-m", "trainworthy.launch", "run", recipe, *settings, "--run.seed", str(seed), "--run.out", str(out),
               "--gates.no-remember"]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True)
    if done.returncode != DONE:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        again = shlex.join(["trainworthy", "run", recipe, *settings, "--run.seed", str(seed)])
        raise UserError(f"seed {seed} ended with exit {done.returncode}: nothing is written", got=last, next=again)
    return next(out.rglob("summary.json")).parent
