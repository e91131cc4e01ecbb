"""The planted bugs and healthy variants of a checkout, as cases that a command can run."""

import random
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from trainworthy.core.base.errors import UserError
from trainworthy.core.base.machine import git
from trainworthy.core.recipe.forks import note
from trainworthy.core.recipe.registry import HOME, find

ROOT = HOME.parent


@dataclass(frozen=True)
class Case:
    recipe: str
    kind: str
    """`planted` or `healthy`."""
    id: str
    old: str = ""
    new: str = ""
    """`old` is replaced by `new` in the recipe's source, unless both are empty."""
    argv: tuple[str, ...] = ()
    gate: str = ""
    """The gate that must stop a planted bug."""
    before: tuple[str, ...] = ()
    """Gates that may fail before it."""
    row: str = ""
    """Its row in the catalogue of bugs."""
    words: tuple[str, ...] = ()
    """Words of the message that name the cause."""
    harm: str = ""
    source: str = ""
    known: str = ""
    """Why it is known to fail its test today."""


def cases(recipes: Collection[str], kinds: Collection[str]) -> list[Case]:
    """Return the cases of these recipes (all recipes if there are none), by recipe, planted bugs first."""
    if not (ROOT / "tests" / "helpers" / "plant.py").is_file():
        raise UserError("planted bugs and healthy variants come with the source code, not with an installation",
                        got=str(ROOT), needed="a checkout of the repository, installed by pip install -e .; mutants need none",
                        next="trainworthy bugs --mutate vision/classify")  # fmt: skip
    found = []
    if "planted" in kinds:
        found += [Case(p.recipe, "planted", p.id, p.old, p.new, tuple(p.argv), p.gate, tuple(p.before), p.row, tuple(p.words),
                       p.harm, p.source, p.missed) for p in _lists("planted_*.py", "PLANTS")]  # fmt: skip
    if "healthy" in kinds:
        found += [Case(h.recipe, "healthy", h.id, *(h.hunk or ("", "")), tuple(h.argv), known=h.alarm)
                  for h in _lists("healthy_*.py", "VARIANTS")]  # fmt: skip
        found += [Case(r, "healthy", "as-it-is") for r in sorted({c.recipe for c in found} | {*recipes})]
    chosen = [c for c in found if not recipes or c.recipe in recipes]
    return sorted(chosen, key=lambda c: (c.recipe, c.kind != "planted", c.id))


def sampled(found: list[Case], n: int | None, seed: int = 0) -> list[Case]:
    """Return `n` random cases of each recipe and kind; a larger sample contains a smaller one."""
    if n is None:
        return found
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in found:
        groups.setdefault((case.recipe, case.kind), []).append(case)
    chosen = {c for group in groups.values() for c in random.Random(seed).sample(group, len(group))[:n]}
    return [c for c in found if c in chosen]


def _lists(pattern: str, name: str) -> list:
    """Return the lists called `name` of all test modules that match, joined."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    files = sorted((ROOT / "tests").rglob(pattern))
    try:
        modules = [import_module(".".join(p.relative_to(ROOT).with_suffix("").parts)) for p in files]
    except ModuleNotFoundError as error:
        raise UserError(f"the planted bugs need the package '{error.name}', which is not installed",
                        next="pip install -e '.[all,dev]'") from None  # fmt: skip
    return [item for m in modules for item in vars(m)[name]]


def fork(recipe: str, file: Path, *hunks: tuple[str, str]) -> None:
    """Write a fork of a recipe with each (old, new) applied. Each `old` must occur exactly once."""
    entry = find(recipe)
    source = changed = entry.path.read_text()
    for old, new in hunks:
        if changed.count(old) != 1:
            raise UserError(f"a planted bug no longer fits {recipe}", got=f"{changed.count(old)} places", needed="exactly one",
                            cause=f"the recipe was edited: {old.strip().splitlines()[0]}")  # fmt: skip
        changed = changed.replace(old, new)
    written(file, changed, recipe, source)


def written(file: Path, changed: str, recipe: str, source: str) -> None:
    """Write `changed` as `trainworthy fork` would, with the note that names its original."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(changed + note(find(recipe), source, "by trainworthy bugs"))


@cache
def commit() -> str:
    """Return the commit of the checkout, with a hash of its sources if they differ from it; else the installed version."""
    head, status = git(ROOT, "rev-parse", "--short", "HEAD"), git(ROOT, "status", "--porcelain", "core", "recipes")
    if head is None or status is None or not (ROOT / ".git").exists():
        return version("trainworthy")
    if not status.strip():
        return head.strip()
    sources = sorted([*(ROOT / "core").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])
    mark = blake2b(b"".join(p.read_bytes() for p in sources), digest_size=3).hexdigest()
    return f"{head.strip()}+{mark}"
