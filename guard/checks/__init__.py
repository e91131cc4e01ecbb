"""The checks: each reads what was observed and returns a finding, with its cause, or the reason why it does not apply."""
