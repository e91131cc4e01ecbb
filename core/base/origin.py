"""Where an exception comes from: the user's own line, and the library's line where it ended."""

import os
import sysconfig
import traceback
from pathlib import Path

INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
LIBRARIES = tuple(f"{path}{os.sep}" for path in (*INSTALLED, Path(__file__).resolve().parents[1]))
"""Folders whose lines are not the user's: Python's, installed packages', the core's."""


def frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the last frame of the user's code, if there is one, and the frame that raised."""
    every = traceback.extract_tb(error.__traceback__)
    return [*[f for f in every if not f.filename.startswith(LIBRARIES)][-1:], every[-1]]
