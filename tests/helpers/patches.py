"""A change of one place in a file: a bug planted in it, or a healthy variant of it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class ScriptPatch(NamedTuple):
    """A change of a script of tests/guard/scripts."""

    id: str
    script: str
    old: str
    new: str
    kind: str
    source: str
    cause: str

    @property
    def path(self) -> Path:
        return ROOT / "tests" / "guard" / "scripts" / self.script


def cases_of(file: str) -> Callable[[str, str, str, str], ScriptPatch]:
    """Return the maker of a set's changes from (id, old, new, cause). `file`: the set's own, NAME_set.py or NAME_set_heldout.py; its scripts
    are in scripts/NAME, and a script's name is the first part of its changes' ids."""
    path = Path(file)
    folder = path.stem.removesuffix("_heldout").removesuffix("_set")

    def case(id: str, old: str, new: str, cause: str) -> ScriptPatch:
        return ScriptPatch(id, f"{folder}/{id.partition('--')[0]}.py", old, new, "outside", path.name, cause)

    return case


class RecipePatch(NamedTuple):
    """A change of a recipe's own file."""

    id: str
    recipe: str
    file: str
    old: str
    new: str
    kind: str
    source: str
    cause: str

    @property
    def path(self) -> Path:
        return ROOT / self.file


def patched(patch: ScriptPatch | RecipePatch) -> str:
    """The text of the changed file. Raises where the old text does not occur exactly once."""
    text = patch.path.read_text()
    if (n := text.count(patch.old)) != 1:
        raise ValueError(f"{patch.id}: its old text occurs {n} times in {patch.path.name}, needed: once")
    return text.replace(patch.old, patch.new)
