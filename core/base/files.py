"""Writes a file whole: readers, and a run that continues after a kill, see the old text or the new one, never a part."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a file next to `path`, then rename it. A full disk leaves the old file."""
    spare = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        spare.write_text(text, encoding="utf-8")
        os.replace(spare, path)
    except OSError:
        spare.unlink(missing_ok=True)
        raise
