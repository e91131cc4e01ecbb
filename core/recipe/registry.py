"""Finds recipes by path. It reads files and imports nothing, so that `trainworthy list` answers at once."""

import ast
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from trainworthy.core.base.config import unknown
from trainworthy.core.base.errors import UserError

HOME = Path(__file__).resolve().parents[2] / "recipes"


@dataclass
class Entry:
    """A recipe on disk."""

    id: str
    path: Path

    @property
    def summary(self) -> str:
        """First paragraph of its docstring, as one line: a sentence may be longer than a line."""
        doc = ast.get_docstring(ast.parse(self.path.read_text())) or ""
        return " ".join(doc.split("\n\n")[0].split()).rstrip(".")

    @property
    def measured(self) -> dict:
        """Newest result of the preset `tiny` that `bench/results.py` measured; empty if there is none."""
        return json.loads(found[-1].read_text()) if (found := self.results()) else {}

    def results(self, preset: str = "tiny") -> list[Path]:
        """Files of measured results, the newest last: results/NAME/PRESET-DATE.json next to the recipe, one for each measurement."""
        folder = self.path.parent / "results" / self.path.stem
        return sorted(folder.glob(f"{preset}-*.json"), key=lambda path: path.stem)

    def next_result(self, preset: str, date: str) -> Path:
        """File for a new measurement; an earlier one is never overwritten."""
        folder = self.path.parent / "results" / self.path.stem
        names = [f"{preset}-{date}", *(f"{preset}-{date}-{n}" for n in range(2, 10))]
        return next(path for name in names if not (path := folder / f"{name}.json").exists())

    @property
    def gates_off(self) -> bool:
        """Whether its result was measured without gates, which must be shown with the result."""
        return self.measured.get("gates") == "off"

    @property
    def reference(self) -> Path:
        """Band of its healthy runs, stored next to the recipe by `trainworthy reference`."""
        return self.path.parent / "results" / f"{self.path.stem}.band.json"


def recipes() -> list[Entry]:
    """Return every recipe: ours, and those of packages in the entry-point group `trainworthy.recipes`."""
    roots = [HOME]
    for point in importlib.metadata.entry_points(group="trainworthy.recipes"):
        spec = importlib.util.find_spec(point.value)
        roots += [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = []
    for root in roots:
        for path in sorted(root.glob("*/*.py")):
            if path.parent.name != "shared" and not path.name.startswith("_") and is_recipe(path):
                found.append(Entry(f"{path.parent.name}/{path.stem}", path))
    return found


def is_recipe(path: Path) -> bool:
    """Return whether the file assigns STAGES at its top level."""
    targets = [
        t for n in ast.parse(path.read_bytes()).body for t in getattr(n, "targets", [getattr(n, "target", None)])
    ]
    return any(getattr(t, "id", "") == "STAGES" for t in targets)


def find(name: str) -> Entry:
    """Return a recipe by id, or a file by path."""
    path = Path(name)
    if name.endswith(".py") or path.is_file():
        if not path.is_file():
            raise UserError(f"no recipe file {name}", got="no such file", needed="a path to a .py file",
                            next="trainworthy fork vision/classify ./mine.py")  # fmt: skip
        path = path.resolve()
        ours = next((e for e in recipes() if e.path == path), None)
        return ours or Entry(path.stem, path)
    known = {e.id: e for e in recipes()}
    if name in known:
        return known[name]
    raise unknown(f"recipe '{name}'", name, known, next="trainworthy list")
