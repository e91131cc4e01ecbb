"""Finds the newest complete checkpoint of a stage. Several processes hash its files together, each a part."""

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainworthy.core.base.errors import UserError
from trainworthy.core.data.assets import sha256

MANIFEST = "manifest.json"
LATEST = "latest"
SAVED = ".saved"
"""An empty file beside the stages' folders: a checkpoint was saved. Without one, a run without checkpoints was stopped before its first."""
TRIES, PAUSE = 3, 0.3  # attempts to read a file after a disk error, and seconds between them


@dataclass
class Readers:
    """Processes that read a checkpoint together. All of them call what takes it."""

    rank: int = 0
    world: int = 1
    gather: Callable[[Any], list[Any]] = lambda one: [one]
    """Returns every rank's value on every rank."""


ALONE = Readers()


def verify(folder: Path, readers: Readers = ALONE) -> str:
    """Return what is wrong with the checkpoint in `folder`; empty if it is complete. Raises UserError if it cannot be
    read at present: that is no sign of damage, and skipping the checkpoint would lose steps."""
    fault, unreadable = "", ""
    for left in reversed(range(TRIES)):
        try:
            fault, unreadable = _fault(folder, readers), ""
            break
        except OSError as error:
            unreadable = str(error)
        if left:
            time.sleep(PAUSE)
    every = readers.gather((fault, unreadable))
    if silent := next((why for _, why in every if why), ""):
        raise UserError(f"the checkpoint {folder} cannot be read now; it need not be damaged", got=silent,
                        needed="a disk that answers, and the right to read",
                        cause="a network file system that is away for a moment",
                        next="the same command again; if the disk still does not answer, move this checkpoint away and resume "
                             "from the one before")  # fmt: skip
    return next((why for why, _ in every if why), "")


def _fault(folder: Path, readers: Readers) -> str:
    """As `verify`, of this process's part of the files; raises OSError if files exist and cannot be read."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        mine = sorted(files, key=lambda name: -files[name]["bytes"])[readers.rank :: readers.world]
        for name in mine:
            if sha256(folder / name) != files[name]["sha256"]:
                return f"{name} does not match its hash"
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        return f"incomplete ({error})"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be understood ({type(error).__name__}: {error})"
    return ""


def survey(folder: Path, readers: Readers = ALONE) -> tuple[Path | None, dict[str, str]]:
    """Return (newest full checkpoint of a stage's folder with matching hashes, {name of a newer one: what is wrong with
    it})."""
    damaged = {}
    for name in readers.gather([p.name for p in reversed(steps(folder))])[0]:
        one = folder / name
        why = verify(one, readers)
        if not why:
            return one, damaged
        damaged[name] = why
    return None, damaged


def put_back(folder: Path) -> None:
    """Restore the name of a complete checkpoint that was moved aside for a new one of the same step, if a kill
    prevented the new one."""
    for trash in folder.glob(".trash-step-*"):
        whole = trash.with_name(trash.name.removeprefix(".trash-"))
        if not whole.exists() and not verify(trash):
            os.rename(trash, whole)


def steps(folder: Path) -> list[Path]:
    """Return folders of full checkpoints, oldest first, complete or not."""
    return sorted((p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name)), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])
