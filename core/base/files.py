"""Reads and writes the files of a run, which may be cut off by a kill: readers, and a run that continues, see the old text or the new
one, never a part."""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any


def stamp() -> str:
    """Return a name for a new folder: the time, and what keeps two of one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def read_json(path: Path, kind: type = dict) -> Any:
    """Return the file's content; an empty `kind` if it is missing, half-written, or of another kind."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return kind()
    return found if isinstance(found, kind) else kind()


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a file next to `path`, then rename it. A full disk leaves the old file."""
    spare = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        spare.write_text(text, encoding="utf-8")
        os.replace(spare, path)
    except OSError:
        spare.unlink(missing_ok=True)
        raise
