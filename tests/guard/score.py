"""Guard the scripts, variants and bugs of a set by the command, or check what their `make_script()`, `make_loop()` or `make_trainer()` returns.

    python -m tests.guard.score ninth [--half open|heldout|both] [--kind scripts|healthy|bugs|all] [--by guard|check] [--out FOLDER] [NAME ...]

Prints for each case: kind, name, exit code (3: stopped), CPU seconds, the first failed check and its first likely cause. The output of each
is kept under --out. Cases run in forks of a process that has imported `--preload`, which saves most of the time of scripts with large
imports.
"""

import argparse
import importlib
import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.helpers.patches import ScriptPatch, patched

FACTORIES = ("make_script", "make_loop", "make_trainer")
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
    """(the first failed check with what it measured, its first likely cause) as printed. The last lines may name another check."""
    lines = said.splitlines()
    for i, line in enumerate(lines):
        if re.match(r"\s*FAIL\b", line):
            cause = next((x.partition("likely causes")[2].strip() for x in lines[i:] if "likely cause" in x), "")
            last = next(
                (x.partition("likely cause:")[2].strip() for x in reversed(lines) if "likely cause:" in x), cause
            )
            return " ".join(line.split())[:160], last[:200]
    return "-", "-"


def run(by: str, folder: Path, script: str) -> tuple[int, float]:
    """(exit code of `trainworthy guard SCRIPT`, or of a check of its parts; its CPU seconds), in a fork of this process."""
    if pid := os.fork():
        _, status, usage = os.wait4(pid, 0)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    code: Any = 2
    try:
        os.chdir(folder)
        said = os.open(f"{by}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.path.insert(0, "")
        if by == "check":
            import trainworthy

            module = importlib.import_module(Path(script).stem)
            factory = next(getattr(module, name) for name in FACTORIES if hasattr(module, name))
            code = 0 if trainworthy.check(factory, raises=False).ok else 3
        else:
            sys.argv = ["trainworthy", "guard", script]
            runpy.run_module("trainworthy", run_name="__main__", alter_sys=True)
            code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--half", choices=["open", "heldout", "both"], default="open")
    parser.add_argument("--kind", choices=["scripts", "healthy", "bugs", "all"], default="all")
    parser.add_argument("--by", choices=["guard", "check"], default="guard")
    parser.add_argument("--preload", nargs="*", default=["torch"])
    parser.add_argument("--out", type=Path, default=Path("runs/guarded"))
    args = parser.parse_args()
    for name in args.preload:
        importlib.import_module(name)
    for kind, id, text in cases(args.set, args.half, args.kind):
        if args.names and id not in args.names:
            continue
        if args.by == "check" and not re.search(rf"^def ({'|'.join(FACTORIES)})\(", text, re.M):
            print(kind, id, f"skipped: none of {', '.join(FACTORIES)}", sep="\t", flush=True)
            continue
        folder = (args.out / id).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / f"{id.partition('--')[0]}.py"
        script.write_text(text)
        code, seconds = run(args.by, folder, script.name)
        print(
            kind,
            id,
            code,
            f"{seconds:.0f} s",
            *first_failure((folder / f"{args.by}.txt").read_text()),
            sep="\t",
            flush=True,
        )


if __name__ == "__main__":
    main()
