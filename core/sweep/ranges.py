"""Ranges to search where none is given: those a recipe declares, the general ones, and that of a learning-rate range test."""

import json
import subprocess
import sys
from typing import Any

from trainworthy.core.base import config
from trainworthy.core.base.console import last_line
from trainworthy.core.base.errors import UserError

FACTOR = 30.0
"""A rate is searched this factor to either side of the preset's, or of the range test's suggestion."""


def declared(kind: type) -> dict[str, str]:
    """Return {setting: range} of a recipe's Config and its bases: `SEARCH_RANGES`, a class attribute, as a sweep's command line has them."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        for word in vars(one).get("SEARCH_RANGES", "").split():
            name, equals, given = word.partition("=")
            if not equals or not given:
                needed = "NAME=LOW:HIGH, separated by spaces"
                raise UserError(f"SEARCH_RANGES of {one.__module__} cannot be read", got=word, needed=needed)
            found[name] = given
    return found


def known(cfg: config.Config) -> dict[str, str]:
    """Return {setting: range} of everything that can be searched without a range: rates by a factor around the preset's own, and what
    the recipe declares. A common setting that each stage sets for itself has no effect, so it is not among them."""
    found = {}
    phases = config.phases(cfg)
    for name, value in config.flat(config.to_dict(cfg)).items():
        group, _, last = name.rpartition(".")
        if last == "lr" or last.endswith("_lr"):
            rate = (value or cfg.optim.lr) if group in phases else value
            if isinstance(rate, float) and rate > 0:
                found[name] = around(rate)
    common = {k.removeprefix("optim."): v for k, v in declared(type(cfg)).items() if k.startswith("optim.")}
    for name, phase in phases.items():
        found |= {f"{name}.{k}": v for k, v in common.items() if k in vars(phase)}
    own = [k for k in ("lr", *common) if phases and all(vars(p).get(k) is not None for p in phases.values())]
    idle = {f"optim.{k}" for k in own}
    return {name: given for name, given in (found | declared(type(cfg))).items() if name not in idle}


def around(rate: float, *, high: float = float("inf")) -> str:
    """Return the range a factor of 30 to either side of a rate, at most up to `high`."""
    return f"{rate / FACTOR:.2g}:{min(rate * FACTOR, high):.2g}"


def rates(cfg: config.Config) -> list[str]:
    """Return the settings of peak rates: of each stage that trains and has its own, and the common one if another uses it."""
    active = {name: phase for name, phase in config.phases(cfg).items() if phase.epochs != 0}
    own = [f"{name}.lr" for name, phase in active.items() if phase.lr is not None]
    return own if own and len(own) == len(active) else [*own, "optim.lr"]


def tested(
    recipe: str, fixed: list[str], compared: list[dict[str, Any]], words: Any
) -> tuple[dict[str, str], list[str]]:
    """Run the learning-rate range test for each combination of compared settings.

    Returns ({setting: range that holds every suggestion}, lines that say where the ranges come from). A stage without a range test,
    or without a usable rate in it, has no entry."""
    spans: dict[str, list[tuple[float, float]]] = {}
    lines = []
    for chosen in compared:
        command = [sys.executable, "-m", "trainworthy", "lr", recipe, *fixed, *words(chosen), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            got = f"exit {done.returncode}: {last_line(done.stderr)}"
            raise UserError("the range test did not end", got=got, next=" ".join(command[2:-1]))
        about = ", ".join(f"{k} {v}" for k, v in chosen.items())
        for row in json.loads(done.stdout)["stages"]:
            if not row["tested"] or row["stage"].endswith("-one-batch"):
                lines += [f"no range test of {row['stage']}: {row['why']}"] if not row["tested"] else []
                continue
            at = f"{row['setting']}{f' with {about}' if about else ''}"
            if row["suggestion"] is None:
                lines.append(f"the range test of {at} found no usable rate ({row['verdict']})")
                continue
            low, high = around(row["suggestion"], high=row["usable_to"] if row["blew_up"] else float("inf")).split(":")
            spans.setdefault(row["setting"], []).append((float(low), float(high)))
            lines.append(f"the range test of {at} suggests {row['suggestion']:.1e}")
    found = {k: f"{min(a for a, _ in v):.2g}:{max(b for _, b in v):.2g}" for k, v in spans.items()}
    return found, list(dict.fromkeys(lines))
