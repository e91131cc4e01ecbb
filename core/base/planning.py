"""Flags of commands that build stages without training them: what only training or scoring needs may be missing then."""

import contextlib
from collections.abc import Callable

active = False
"""`trainworthy plan` simulates: tensors have no values, models are built from their config.json, files of weights may be missing."""
paused: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
"""Within it nothing is simulated: what is computed once and kept must be real."""
is_describing_data = False
"""`trainworthy data` shows the data; nothing is trained or scored."""
