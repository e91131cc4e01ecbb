"""Texts that are part of every Python: its manual (`pydoc_data.topics`), split into sections, and the docstrings of the standard
library's modules, classes and functions (PSF licence).

Texts are those of the running Python, cached for each version; the data set's notes name it. Topics quote each other, so every paragraph
is used once. The split is by section and by top-level module and does not depend on the run's seed. Training texts lose every paragraph
that shares eight consecutive words with a held-out text; so do the texts of the test with those of validation.
"""

import ast
import json
import platform
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from zlib import crc32

from trainworthy.core.data import texts
from trainworthy.core.data.assets import built
from trainworthy.recipes.llm.data import docstrings

FEWEST = 12  # words; a shorter text is a label
SHINGLE = 8  # words in a row that no two authors write alike by chance
HELD_OUT = 12  # one section or module in so many


@cache
def load(test: bool = False) -> tuple[list[str], list[str], list[str], dict[str, str]]:
    """(train documents, val documents, test documents, notes). Without `test` its documents are for training."""

    def build(folder: Path) -> None:
        (folder / "texts.json").write_text(json.dumps([*manual(), *library(Path(sysconfig.get_paths()["stdlib"]))]))

    folder = built("prose", {"python": platform.python_version()}, build, sources=[__file__, docstrings.__file__])
    found = json.loads((folder / "texts.json").read_text())
    *splits, notes = split(found, test)
    mark = sha256("\n".join(text for _, text in found).encode()).hexdigest()[:12]
    source = f"manual and docstrings of Python {platform.python_version()}, SHA-256 {mark}"
    return *splits, {"source": source, "left out": notes}


def manual() -> Iterator[tuple[str, str]]:
    """(heading, text) of each section of the manual; a heading is underlined, and the first line of its section."""
    from pydoc_data.topics import topics

    for _, topic in sorted(topics.items()):
        for part in re.split(r"(?m)^(?=\S.*\n([*=\-~^\"])\1+$)", topic.strip())[::2]:
            if part.strip():
                yield part.strip().split("\n")[0], part.strip("\n")


def library(root: Path) -> Iterator[tuple[str, str]]:
    """(top-level module, docstring) of everything documented under `root`; nothing is imported."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).parts
        if docstrings.SKIPPED & {*place}:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # some of the library's files are wrong on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield place[0].removesuffix(".py"), ast.get_docstring(node) or ""


def split(found: list[tuple[str, str]], test: bool = False) -> tuple[list[str], list[str], list[str], str]:
    """(train, val, test, what was left out): texts with the name of what they belong to, by that name."""
    seen: set[str] = set()
    train, val, rest = [], [], []  # documents as paragraphs
    sides = {0: val, 1: rest if test else train}
    read = 0
    for name, text in found:
        if len(texts.words(text)) < FEWEST:
            continue
        paragraphs = [p.rstrip() for p in re.split(r"\n\s*\n", text) if p.strip()]
        read += len(paragraphs)
        new = [p for p in paragraphs if (n := texts.normal(p)) not in seen and not seen.add(n)]
        sides.get(crc32(texts.normal(name).encode()) % HELD_OUT, train).append(new)
    rest, shared = without(rest, val)
    train, more = without(train, [*val, *rest])
    notes = (
        f"of {read:,} paragraphs {read - len(seen):,} that occur twice, {more + shared:,} that share {SHINGLE} words with "
        + ("held-out ones" if test else "val")
    )
    documents = (
        ["\n\n".join(d) for d in side if len(texts.words(" ".join(d))) >= FEWEST] for side in (train, val, rest)
    )
    return *documents, notes


def without(documents: list[list[str]], others: list[list[str]]) -> tuple[list[list[str]], int]:
    """(the documents without paragraphs that share words with others, how many those are)."""
    known = {s for document in others for p in document for s in shingles(p)}
    kept = [[p for p in document if not known & shingles(p)] for document in documents]
    return kept, sum(map(len, documents)) - sum(map(len, kept))


def shingles(text: str) -> set[tuple[str, ...]]:
    """Every `SHINGLE` words in a row."""
    words = texts.words(text)
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
