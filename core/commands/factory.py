"""`trainworthy check mine.py` where mine.py is no recipe and has a function `factory`, which builds a Script, a Loop or a Trainer."""

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.errors import GateFailed, UserError
from trainworthy.core.base.files import stamp
from trainworthy.core.commands import prints_json
from trainworthy.core.recipe.registry import is_recipe

NAME = "factory"
FLAGS = ("--only", "--seed", "--waive", "--because", "--out")


def offers(path: Path) -> bool:
    """Return whether a file has a function `factory` at its top level and is no recipe. Nothing is imported."""
    try:
        made = any(isinstance(n, ast.FunctionDef) and n.name == NAME for n in ast.parse(path.read_bytes()).body)
        return made and not is_recipe(path)
    except (SyntaxError, ValueError):
        return False


@prints_json
def main(argv: list[str], found: dict[str, Any]) -> None:
    """Run the gates on what the file's factory builds; put folder and verdicts into `found`. Raises GateFailed."""
    script, rest = argv[1], argv[2:]
    values: dict[str, str | None] = {}
    for flag in FLAGS:
        rest, values[flag] = config.take(rest, flag)
    if rest:
        raise UserError(f"unknown word {rest[0]} for a file with a {NAME}()", needed=", ".join(FLAGS))
    if values["--waive"] and not values["--because"]:
        raise UserError("a waived gate needs a reason", next='--because "..."')
    if values["--seed"] is not None and not values["--seed"].isdigit():
        raise UserError("--seed needs a number", got=values["--seed"])
    path = Path(script).resolve()
    out = Path(values["--out"] or Path("runs") / f"check-{path.stem}" / stamp())
    sys.argv = [str(path)]
    sys.path.append(str(path.parent))  # it may import neighbouring files; last, so that they shadow nothing
    from trainworthy.core.report.plain import verdicts_of

    from trainworthy import check

    made = runpy.run_path(str(path), run_name=path.stem)[NAME]
    waive = {id: values["--because"] or "" for id in (values["--waive"] or "").split(",") if id}
    try:
        result = check(
            made, only=values["--only"] or "", waive=waive, seed=int(values["--seed"] or 0), raises=False, folder=out
        )
        if result.failed:  # the verdicts stand in the lines above
            raise GateFailed(result.closing)
    finally:
        found |= verdicts_of(out)
        if (out / "gates.json").is_file():
            print(f"  evidence in {out}/gates.json")
