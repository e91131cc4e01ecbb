"""Run cases of a set from outside through the gates, as their author would: fork the recipe, edit the fork, check it.

    python -m tests.helpers.set_run [--set third|...|nineteenth] [--half open|heldout|both] [--kind bugs|healthy|both] [--out FOLDER] [NAME ...]
    python -m tests.helpers.set_run [--set ...] --train [--settings "..."] NAME     a run without gates, to measure harm

Prints for each case: name, exit code (0 passed, 2 refused as bad usage or data, 3 a gate failed), the first failed gate and its first likely cause.
Each case has a folder under --out with the fork, its data and the output (`output.txt`).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.helpers import (
    eighteenth_set,
    eighteenth_set_heldout,
    eighth_set,
    eighth_set_heldout,
    eleventh_set,
    eleventh_set_heldout,
    fifteenth_set,
    fifteenth_set_heldout,
    fifth_set,
    fifth_set_heldout,
    fourteenth_set,
    fourteenth_set_heldout,
    fourth_set,
    fourth_set_heldout,
    nineteenth_set,
    nineteenth_set_heldout,
    ninth_set,
    ninth_set_heldout,
    seventeenth_set,
    seventeenth_set_heldout,
    seventh_set,
    seventh_set_heldout,
    sixteenth_set,
    sixteenth_set_heldout,
    sixth_set,
    sixth_set_heldout,
    tenth_set,
    tenth_set_heldout,
    third_set,
    third_set_heldout,
    thirteenth_set,
    thirteenth_set_heldout,
    twelfth_set,
    twelfth_set_heldout,
)
from tests.helpers.set_cases import ROOT, Case, edited

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
}  # a run starts the package anew: it must be the one of this checkout
SETS = {
    "third": {"open": third_set, "heldout": third_set_heldout},
    "fourth": {"open": fourth_set, "heldout": fourth_set_heldout},
    "fifth": {"open": fifth_set, "heldout": fifth_set_heldout},
    "sixth": {"open": sixth_set, "heldout": sixth_set_heldout},
    "seventh": {"open": seventh_set, "heldout": seventh_set_heldout},
    "eighth": {"open": eighth_set, "heldout": eighth_set_heldout},
    "ninth": {"open": ninth_set, "heldout": ninth_set_heldout},
    "tenth": {"open": tenth_set, "heldout": tenth_set_heldout},
    "eleventh": {"open": eleventh_set, "heldout": eleventh_set_heldout},
    "twelfth": {"open": twelfth_set, "heldout": twelfth_set_heldout},
    "thirteenth": {"open": thirteenth_set, "heldout": thirteenth_set_heldout},
    "fourteenth": {"open": fourteenth_set, "heldout": fourteenth_set_heldout},
    "fifteenth": {"open": fifteenth_set, "heldout": fifteenth_set_heldout},
    "sixteenth": {"open": sixteenth_set, "heldout": sixteenth_set_heldout},
    "seventeenth": {"open": seventeenth_set, "heldout": seventeenth_set_heldout},
    "eighteenth": {"open": eighteenth_set, "heldout": eighteenth_set_heldout},
    "nineteenth": {"open": nineteenth_set, "heldout": nineteenth_set_heldout},
}


def chosen(of: str, half: str, kind: str, names: list[str]) -> list[Case]:
    """The cases of a set's half and kind, or those named."""
    halves = SETS[of].values() if half == "both" or names else [SETS[of][half]]
    cases = [
        c
        for h in halves
        for c in (*(h.BUGS * (kind != "healthy" or bool(names))), *(h.HEALTHY * (kind != "bugs" or bool(names))))
    ]
    if missing := set(names) - {c.id for c in cases}:
        raise SystemExit(f"no such case: {', '.join(sorted(missing))}")
    return [c for c in cases if not names or c.id in names]


def forked(case: Case, folder: Path) -> list[str]:
    """Write the fork and its data into `folder`; return what names both on the command line."""
    folder.mkdir(parents=True, exist_ok=True)
    fork = folder / f"{case.recipe.rpartition('/')[2]}_fork.py"
    fork.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "trainworthy", "fork", case.recipe, fork], cwd=ROOT, check=True, capture_output=True
    )
    fork.write_text(edited(case, fork.read_text()))
    data = case.data(folder / "data") if case.data else ()
    return [str(fork), *data, *case.argv]


def failed(out: Path) -> tuple[str, str]:
    """(the first failed gate, its first likely cause) of the newest gates.json under `out`; empty if none failed."""
    found = sorted(out.rglob("gates.json"), key=lambda p: p.stat().st_mtime)
    for gate in json.loads(found[-1].read_text())["gates"] if found else []:
        if gate["verdict"] == "fail":
            lines = (gate["cause"] or gate["remedy"]).strip().splitlines()
            return f"{gate['id']} ({gate['verdict']})", lines[0] if lines else ""
    return "", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--set", choices=SETS, default="third")
    parser.add_argument("--half", choices=["open", "heldout", "both"], default="open")
    parser.add_argument("--kind", choices=["bugs", "healthy", "both"], default="both")
    parser.add_argument("--out", type=Path, help="default: runs/third_set, or that of the set")
    parser.add_argument("--train", action="store_true", help="train without gates instead of checking")
    parser.add_argument("--settings", default="", help="further settings, such as '--train.epochs 2'")
    args = parser.parse_args()
    out = args.out or Path("runs") / f"{args.set}_set"
    for case in chosen(args.set, args.half, args.kind, args.names):
        folder = (out / case.id).resolve()
        given = [*forked(case, folder), *shlex.split(args.settings), "--run.out", str(folder / "runs")]
        command = ["run", *given, "--gates.no-enabled"] if args.train else ["check", *given]
        with (folder / "output.txt").open("w") as output:
            code = subprocess.run(
                [sys.executable, "-m", "trainworthy", *command],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
            ).returncode
        gate, cause = ("", "") if args.train else failed(folder)
        print(f"{case.id}\t{code}\t{gate or '-'}\t{cause or '-'}", flush=True)


if __name__ == "__main__":
    main()
