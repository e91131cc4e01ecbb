"""A flag: `trainworthy plan` is building the stages. Tensors have no values then, so models are built from their config.json, and
files of weights may be missing."""

active = False
"""Set by core.session.estimate while it simulates."""
