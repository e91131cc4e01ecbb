"""Remembers passed gates under a fingerprint, so that an unchanged recipe starts at once and a changed one runs its gates
again.

A second fingerprint, which excludes the data, stores how much of the data was read. The next run reads as much, because
the identity of the data depends on it.
"""

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainworthy.core.base.files import read_json, write_whole
from trainworthy.core.data.assets import cache_dir


def _path(fingerprint: str) -> Path:
    return cache_dir() / "ledger" / f"{fingerprint}.json"


def _write(name: str, rows: dict[str, Any]) -> None:
    path = _path(name)
    with contextlib.suppress(OSError):  # an unwritable cache costs repeated gates, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(rows, default=str))


def read(fingerprint: str) -> tuple[dict[str, dict], dict[str, str]]:
    """Return ({gate id: verdict} for exactly this fingerprint, {file: hash} of the sources that the gates imported);
    empty if there is none or it cannot be read."""
    found = read_json(_path(fingerprint))
    return found.get("gates", {}), found.get("late", {})


def write(fingerprint: str, verdicts: list, late: dict[str, str]) -> None:
    """Remember passes and skips, never a failure or a waiver. `late`: sources that only the gates imported, which the
    fingerprint does not cover."""
    stamp = time.strftime("%Y-%m-%d %H:%M")
    rows = {v.id: {**asdict(v), "remembered": v.remembered or stamp} for v in verdicts if v.verdict in ("pass", "skip")}
    _write(fingerprint, {"gates": rows, "late": late})


def extent(fingerprint: str) -> dict[str, dict]:
    """Return {split: how much of it was read} for the last run with this fingerprint, which excludes the data."""
    return read_json(_path(f"{fingerprint}-read"))


def keep_extent(fingerprint: str, found: dict[str, dict]) -> None:
    kept = {name: {k: one[k] for k in ("samples", "read", "hashed")} for name, one in found.items()}
    _write(f"{fingerprint}-read", kept)
