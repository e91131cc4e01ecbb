"""Guard the scripts, variants and bugs of a set by the command.

    python -m tests.guard.score ninth [--half open|heldout|both] [--kind scripts|healthy|bugs|all] [--out FOLDER] [NAME ...]

Prints for each case: kind, name, exit code (3: stopped), seconds, the first failed check and its first likely cause. The output of each
is kept under --out.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.patches import ScriptPatch, patched

ROOT, SCRIPTS = Path(__file__).parents[2], Path(__file__).parent / "scripts"


def cases(name: str, half: str, kind: str) -> list[tuple[str, str, str]]:
    """(kind, id, text of the script)."""
    parts = [""] * (half != "heldout") + ["_heldout"] * (half != "open")
    modules = [importlib.import_module(f"tests.guard.{name}_set{part}") for part in parts]
    whole = [("scripts", p.stem, p.read_text()) for p in sorted((SCRIPTS / name).glob("*.py"))] * (half != "heldout")
    of: dict[str, list[ScriptPatch]] = {
        "healthy": [c for m in modules for c in m.HEALTHY],
        "bugs": [c for m in modules for c in m.BUGS if c.id in m.HARMFUL],
    }
    found = whole + [(k, c.id, patched(c)) for k, some in of.items() for c in some]
    return [c for c in found if kind in ("all", c[0])]


def first_failure(said: str) -> tuple[str, str]:
    """(the first failed check with what it measured, its first likely cause) as printed."""
    lines = said.splitlines()
    for i, line in enumerate(lines):
        if re.match(r"\s*FAIL\b", line):
            cause = next((x.partition("likely causes")[2].strip() for x in lines[i:] if "likely cause" in x), "")
            return " ".join(line.split())[:160], cause[:200]
    return "-", "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--half", choices=["open", "heldout", "both"], default="open")
    parser.add_argument("--kind", choices=["scripts", "healthy", "bugs", "all"], default="all")
    parser.add_argument("--out", type=Path, default=Path("runs/guarded"))
    args = parser.parse_args()
    for kind, id, text in cases(args.set, args.half, args.kind):
        if args.names and id not in args.names:
            continue
        folder = (args.out / id).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{id.partition('--')[0]}.py"
        script.write_text(text)
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "trainworthy", "guard", script.name], cwd=folder, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        (folder / "output.txt").write_text(done.stdout + done.stderr)
        print(
            kind,
            id,
            done.returncode,
            f"{time.monotonic() - begun:.0f} s",
            *first_failure(done.stdout),
            sep="\t",
            flush=True,
        )


if __name__ == "__main__":
    main()
