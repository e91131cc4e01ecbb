"""Names of the standard library's functions, with the first sentence of their docstrings.

Parsed from the sources of the running Python (nothing is imported), cached per version. The split is by top-level module, so that no
module's habits are known; sentences that occur in both splits are removed from training (5% of them, word for word).
"""

import ast
import json
import platform
import re
import sysconfig
from functools import cache
from pathlib import Path
from zlib import crc32

from trainworthy.core.data import texts
from trainworthy.core.data.assets import built

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"}
WORDS = range(3, 25)  # words in a sentence: fewer carry no information, more are a list or a paragraph


@cache
def load() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (train, val) rows of `prompt` (the sentence), `completion` (the name) and `source` (the module)."""

    def build(folder: Path) -> None:
        (folder / "rows.json").write_text(json.dumps(parse(Path(sysconfig.get_paths()["stdlib"]))))

    folder = built("docstrings", {"python": platform.python_version()}, build, sources=[__file__])
    return split(json.loads((folder / "rows.json").read_text()))


def parse(root: Path) -> list[dict[str, str]]:
    """Return one row for every documented function under `root`, without repeated pairs of sentence and name."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root).parts
        if SKIPPED & {*place}:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # some of the library's files have syntax errors on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (doc := ast.get_docstring(node)):
                sentence, name = first_sentence(doc), node.name.strip("_")
                if sentence and name:
                    row = {"prompt": sentence, "completion": name, "source": place[0].removesuffix(".py")}
                    found.setdefault((texts.normal(sentence), name), row)
    return list(found.values())


def first_sentence(doc: str) -> str:
    """Return the first sentence of a docstring on one line, or "" if there is none (doctests, signatures, lists)."""
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    good = sentence.isascii() and not re.search(r">>>|->|::|^\W|^\w+\(", sentence)
    return sentence if good and len(sentence.split()) in WORDS else ""


def split(rows: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Split by module, independent of the run's seed. Val: at most eight different sentences from each of a fifth of the modules. Train: the
    other modules, without sentences that are in val."""
    modules: dict[str, list[dict[str, str]]] = {}
    for row in sorted(rows, key=lambda r: crc32(r["prompt"].encode())):
        modules.setdefault(row["source"], []).append(row)
    held_out = {name for name in modules if crc32(name.encode()) % 5 == 0}
    some = [row for name in sorted(held_out, key=lambda n: crc32(n.encode())) for row in modules[name][:8]]
    val = list({texts.normal(row["prompt"]): row for row in some}.values())
    known = {texts.normal(row["prompt"]) for row in val}
    return [r for r in rows if r["source"] not in held_out and texts.normal(r["prompt"]) not in known], val
