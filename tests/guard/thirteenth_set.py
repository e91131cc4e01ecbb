"""The eighteen healthy scripts in scripts/thirteenth, written to look for false alarms of `guard` and `trainworthy.check` (2026-11-27).

Their author had not read a check's code, but knew the titles of the checks. Each was run to its end and learns. No bug is planted.
"""

from tests.helpers.patches import ScriptPatch

BUGS: list[ScriptPatch] = []
HEALTHY: list[ScriptPatch] = []
HARMFUL: set[str] = set()
