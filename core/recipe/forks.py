"""Reads the note at the end of a fork that names its recipe, finds the source that it was copied from, and lists the lines to
edit first."""

import ast
import hashlib
import re

from trainworthy.core.base.machine import git
from trainworthy.core.recipe.registry import HOME, Entry

NOTE = re.compile(r"\n*^# forked from (?P<recipe>.+), source (?P<blob>[0-9a-f]{40}), (?P<when>.+)\n*", re.M)


def note(entry: Entry, source: str, when: str) -> str:
    """Return the last line of a fork: its recipe, and git's hash of the recipe's source."""
    recipe = entry.id if HOME in entry.path.parents else entry.path
    return f"\n# forked from {recipe}, source {blob(source)}, {when}\n"


def blob(source: str) -> str:
    """Return git's hash of a file's content, by which `git cat-file` returns it."""
    data = source.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def without_note(source: str) -> str:
    return NOTE.sub("\n", source)


def origin(base: Entry, found: re.Match | None, again: str) -> tuple[str, str]:
    """Return (source to compare with, a remark if the recipe has changed since the fork was made)."""
    today = base.path.read_text()
    if found is None or blob(today) == found["blob"]:
        return today, ""
    remark = "the recipe has changed since this fork was made; this compares with "
    then = git(base.path.parent, "cat-file", "blob", found["blob"])
    if then is None:
        return today, remark + "today's version, because the original one is not available: its changes are shown, too"
    return then, remark + f"the original version. With today's: {again}"


def places(source: str) -> dict[str, int]:
    """Return {what to edit first in a fork: its line}, in the order of the file's use. What a recipe does not have is left out."""
    tree = ast.parse(source)
    every = sorted((n for n in ast.walk(tree) if hasattr(n, "lineno")), key=lambda n: n.lineno)
    reader = next((n.lineno for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "read"), None)
    fields = {id(n.target) for n in every if isinstance(n, ast.AnnAssign)}
    stored: dict[str, int] = {}
    functions: dict[str, int] = {}
    calls: dict[str, int] = {}
    words: dict[str, int] = {}
    for node in every:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            stored.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            calls.setdefault(name.split(".")[-1], node.lineno)
            if re.search(r"(^|\.)Stage$|^hosted\.host$", name):
                for word in node.keywords:
                    names = [n.id for n in ast.walk(word.value) if isinstance(n, ast.Name) and n.id in stored]
                    made = stored[names[0]] if word.arg == "data" and names else word.value.lineno
                    words.setdefault(word.arg or "", made)
    found = {
        "settings of the preset `tiny`": functions.get("tiny"),
        "the data, and their split (by group, if samples share a source)": reader or words.get("data") or words.get("ask"),
        "the loss: return SUMS; core divides them over the whole global batch": functions.get("loss") or words.get("loss"),
        "the trainer, whose loss this is": calls.get("host") if "loss" not in functions else None,
        "the evaluation: the metric that is reported": functions.get("evaluate") or words.get("evaluate"),
        "the question, chance, ceiling and best known result": calls.get("Metric") or words.get("metric"),
        "what a healthy run does (initial loss, loss floor), where theory gives it": calls.get("Expect") or words.get("expect"),
        "the loop": functions.get("train"),
    }  # fmt: skip
    return {what: line for what, line in found.items() if line}
