"""Passes remembered under a fingerprint: an unchanged recipe starts at once, a changed one proves itself again.

Under the fingerprint without the data it is kept how much of the data was read, so that the next run reads as much: what is read
decides what the data are known by.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainworthy.core.data.assets import cache_dir


def _path(fingerprint: str) -> Path:
    return cache_dir() / "ledger" / f"{fingerprint}.json"


def _read(name: str) -> dict[str, Any]:
    try:
        found = json.loads(_path(name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(name: str, rows: dict[str, Any]) -> None:
    path = _path(name)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a second proof, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(rows, default=str))
        os.replace(part, path)


def read(fingerprint: str) -> tuple[dict[str, dict], dict[str, str]]:
    """({gate id: verdict} proved before for exactly this, {file: hash} of the sources that were imported while it was proved);
    empty if there is none or it cannot be read."""
    found = _read(fingerprint)
    return found.get("gates", {}), found.get("late", {})


def write(fingerprint: str, verdicts: list, late: dict[str, str]) -> None:
    """Remember passes and skips; a failure or a waiver is never remembered. `late`: sources that only the gates have imported, so
    that the fingerprint does not cover them."""
    stamp = time.strftime("%Y-%m-%d %H:%M")
    rows = {v.id: {**asdict(v), "remembered": v.remembered or stamp} for v in verdicts if v.verdict in ("pass", "skip")}
    _write(fingerprint, {"gates": rows, "late": late})


def extent(fingerprint: str) -> dict[str, dict]:
    """{split: how much of it was read} the last time under this fingerprint, which is one without data."""
    return _read(f"{fingerprint}-read")


def keep_extent(fingerprint: str, found: dict[str, dict]) -> None:
    """Remember how much was read."""
    kept = {name: {k: one[k] for k in ("samples", "read", "hashed")} for name, one in found.items()}
    _write(f"{fingerprint}-read", kept)
