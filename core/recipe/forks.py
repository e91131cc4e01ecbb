"""Which recipe a fork was made from: a note at its end, and the source of that time."""

import hashlib
import re

from trainworthy.core.base.machine import git
from trainworthy.core.recipe.registry import HOME, Entry

NOTE = re.compile(r"\n*^# forked from (?P<recipe>.+), source (?P<blob>[0-9a-f]{40}), (?P<when>.+)\n*", re.M)


def note(entry: Entry, source: str, when: str) -> str:
    """The line at the end of a fork: its recipe, and git's name for the source it had."""
    recipe = entry.id if HOME in entry.path.parents else entry.path
    return f"\n# forked from {recipe}, source {blob(source)}, {when}\n"


def blob(source: str) -> str:
    """Git's name for a file's content: the content can be asked for by it."""
    data = source.encode()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def without_note(source: str) -> str:
    return NOTE.sub("\n", source)


def origin(base: Entry, found: re.Match | None, again: str) -> tuple[str, str]:
    """(source to compare with, what to say where the recipe is no longer what was forked)."""
    today = base.path.read_text()
    if found is None or blob(today) == found["blob"]:
        return today, ""
    said = "the recipe has changed since this fork was made; this compares with "
    then = git(base.path.parent, "cat-file", "blob", found["blob"])
    if then is None:
        return today, said + "today's, as the version of that time cannot be had: what changed there shows, too"
    return then, said + f"the version of that time. With today's: {again}"
