"""`trainworthy reference`: measures the band of a recipe's healthy runs and stores it next to the recipe."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import DONE, UserError
from trainworthy.core.base.machine import cores
from trainworthy.core.recipe.registry import find

HELP = """\
Run a recipe once per seed, with all gates, and write the band of its curves to results/NAME.band.json next to the recipe.
Reports of later runs draw their curves over this band. Settings are those of `trainworthy run`."""


def main(argv: list[str]) -> None:
    """Run `trainworthy reference RECIPE [--seeds N] [--at-once N] [--to FILE] [settings]`."""
    parser = argparse.ArgumentParser(
        prog="trainworthy reference",
        usage="trainworthy reference RECIPE [--seeds 5] [--at-once N] [--to FILE] [settings]",
        description=HELP,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="id of a recipe, or path of a fork")
    parser.add_argument("--seeds", type=int, default=5, help="number of healthy runs (default 5)")
    parser.add_argument("--at-once", type=int, default=cores().allowed, help="runs in parallel (default: one per core)")
    parser.add_argument("--to", type=Path, help="file to write (default: results/NAME.band.json next to the recipe)")
    args, settings = parser.parse_known_args(argv[1:])
    if args.seeds < 3:
        raise UserError("a band needs more runs", got=f"--seeds {args.seeds}", needed="3 or more")
    target = args.to or find(args.recipe).reference
    from trainworthy.core.report.bands import reference
    from trainworthy.core.report.folder import read

    with tempfile.TemporaryDirectory() as out, ThreadPoolExecutor(args.at_once) as pool:
        folders = []
        for done in pool.map(
            lambda seed: run_seed(args.recipe, seed, settings, Path(out) / str(seed)), range(args.seeds)
        ):
            folders.append(read(done))
            s = folders[-1].summary
            print(f"seed {len(folders) - 1}: {s['metric']} {s['reported'][s['metric']]:.4f}", flush=True)
        kept = reference(folders)
    write(target, kept)
    print(f"{target}: the band of {args.seeds} healthy runs")


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
        raise UserError(f"seed {seed} ended with exit {done.returncode}: nothing is written", got=last)
    return next(out.rglob("summary.json")).parent
