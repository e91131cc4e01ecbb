"""Flags of commands that build stages without training them: what only training or scoring needs may be missing then."""

active = False
"""`trainworthy plan` simulates: tensors have no values, models are built from their config.json, files of weights may be missing."""
describing = False
"""`trainworthy data` shows the data."""
