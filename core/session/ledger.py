"""Passes remembered under a fingerprint: an unchanged recipe starts at once, a changed one proves itself again."""

import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from trainworthy.core.data.assets import cache_dir


def _path(fingerprint: str) -> Path:
    return cache_dir() / "ledger" / f"{fingerprint}.json"


def read(fingerprint: str) -> dict[str, dict]:
    """{gate id: verdict} proved before for exactly this; empty if there is none or it cannot be read."""
    try:
        return json.loads(_path(fingerprint).read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def write(fingerprint: str, verdicts: list) -> None:
    """Remember passes and skips; a failure or a waiver is never remembered."""
    stamp = time.strftime("%Y-%m-%d %H:%M")
    rows = {v.id: {**asdict(v), "remembered": v.remembered or stamp} for v in verdicts if v.verdict in ("pass", "skip")}
    path = _path(fingerprint)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs a second proof, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(rows, default=str))
        os.replace(part, path)
