"""Whether `trainworthy plan` builds the stages: nothing has values then, so that a model is its config.json and files of weights need not be
there."""

active = False
"""Set by core.session.estimate while it simulates."""
