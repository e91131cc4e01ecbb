"""Which settings a sweep changes: scientific ones are compared, nuisance ones are tuned for each of them, all others are fixed."""

import itertools
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainworthy.core.base import config, settings_file
from trainworthy.core.base.errors import UserError
from trainworthy.core.sweep import ranges

EDGE = 0.1
"""Share of a range, at either end, in which a best trial counts as being at its edge."""
DECADES = 100.0
"""A range whose ends differ by this factor or more is searched on a log scale."""
RATES = ("lr", "weight_decay", "eps", "learning_rate", "ent_coef", "beta")
"""Last words of settings that are searched on a log scale however wide the range is."""


@dataclass(frozen=True)
class Range:
    """A nuisance setting: a stretch of numbers, or a few values."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    values: tuple = ()

    def at(self, share: float) -> Any:
        """The value at `share` (0 to 1) of the range, in its scale."""
        if self.values:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        elif self.whole:
            value = int(self.low) + int(share * (int(self.high) - int(self.low) + 1))
        else:
            value = self.low + share * (self.high - self.low)
        value = float(f"{min(max(value, self.low), self.high):.4g}")  # rounding may leave the range
        if self.whole:
            return min(max(round(value), int(self.low)), int(self.high))
        return min(max(value, self.low), self.high)

    def share(self, value: float) -> float:
        """Where in the range a value is, 0 to 1, in its scale."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def words(self) -> str:
        """The range as it is given on a command line."""
        if self.values:
            return f"{self.name}={','.join(map(str, self.values))}"
        scale = "" if self.log == is_log(self.name, self.low, self.high) else ":log" if self.log else ":linear"
        return f"{self.name}={self.low:.4g}:{self.high:.4g}{scale}"

    def wider(self, *, up: bool) -> "Range":
        """The range with as much again beyond the end that the best trial is at."""
        half = math.sqrt(self.high / self.low) if self.log else (self.high - self.low) / 2
        low, high = self.low, self.high
        if up:
            high = high * half if self.log else high + half
        else:
            low = low / half if self.log else low - half
        if self.whole:
            low, high = max(1, math.floor(low)), math.ceil(high)
        if not self.log and self.low >= 0:  # decays, dropouts, discounts: shares stay shares
            low, high = max(0.0, low), min(1.0, high) if self.high <= 1 else high
        return replace(self, low=float(f"{low:.3g}"), high=float(f"{high:.3g}"))


@dataclass(frozen=True)
class Space:
    """All that is searched."""

    scientific: tuple[tuple[str, tuple], ...]
    nuisance: tuple[Range, ...]

    def words(self) -> list[str]:
        """The space as it is given on a command line."""
        found = [w for name, v in self.scientific for w in ("--scientific", f"{name}={','.join(map(str, v))}")]
        return found + [w for r in self.nuisance for w in ("--nuisance", r.words())]

    @property
    def compared(self) -> list[dict[str, Any]]:
        """Every combination of scientific values; one empty one where nothing is compared."""
        names = [name for name, _ in self.scientific]
        return [dict(zip(names, row, strict=True)) for row in itertools.product(*(v for _, v in self.scientific))]

    def point(self, number: int) -> dict[str, Any]:
        """The settings of trial `number`: the combinations take turns, and the n-th trial of each has the n-th quasi-random point,
        the same for all, so that they are compared under equal conditions. A function of the number alone: processes that share a
        study never repeat a point, and a resumed one goes on in the sequence."""
        turn, which = divmod(number, len(self.compared))
        shares = quasi(turn, len(self.nuisance))
        return self.compared[which] | {r.name: r.at(u) for r, u in zip(self.nuisance, shares, strict=True)}

    def structure(self, point: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that change what is built, and not only a number in it. Gates run once for each such structure."""
        numbers = {r.name for r in self.nuisance if not r.values}
        return {k: v for k, v in point.items() if k not in numbers and not isinstance(v, float)}

    @classmethod
    def of(cls, declared: dict[str, Any]) -> "Space":
        """Return the space from what `plain` made of it."""
        scientific = tuple((k, tuple(v)) for k, v in declared["scientific"].items())
        return cls(scientific, tuple(Range(**{**r, "values": tuple(r["values"])}) for r in declared["nuisance"]))

    def plain(self) -> dict[str, Any]:
        """Return the space as the study stores it."""
        return {"scientific": {k: list(v) for k, v in self.scientific}, "nuisance": [asdict(r) for r in self.nuisance]}


def is_log(name: str, low: float, high: float) -> bool:
    """Return whether a range is searched on a log scale where none is given."""
    return name.replace("-", "_").split(".")[-1] in RATES or (low > 0 and high / low >= DECADES)


def quasi(index: int, dimensions: int) -> list[float]:
    """Point `index` of the Halton sequence with permuted digits: evenly spread in every setting, after any number of points."""
    return [_halton(index + 1, base) for base in _primes(dimensions)]


def _halton(index: int, base: int) -> float:
    """Return the permuted digits of `index` (0 stays 0) as digits after the point."""
    digits = [0, *random.Random(base).sample(range(1, base), base - 1)]
    found, scale = 0.0, 1.0
    while index:
        index, digit = divmod(index, base)
        scale /= base
        found += digits[digit] * scale
    return found


def _primes(n: int) -> list[int]:
    found: list[int] = []
    candidate = 2
    while len(found) < n:
        if all(candidate % p for p in found):
            found.append(candidate)
        candidate += 1
    return found


# ------------------------------------------------------------------------------------------------------------- reading
def read_file(path: Path) -> dict[str, Any]:
    """A YAML or JSON file with `scientific`, `nuisance`, `fixed`, and any of trials, seeds and bayes."""
    found = settings_file.read_settings(path)
    known = ("scientific", "nuisance", "fixed", "trials", "seeds", "bayes")
    for name in found:
        if name not in known:
            raise config.unknown(f"entry {name} in {path}", name, known)
    for count in ("trials", "seeds"):
        if (n := found.get(count)) is not None and not (type(n) is int and n > 0):
            raise UserError(f"{count} in {path} needs a number", got=n, needed="1 or more")
    for role in ("scientific", "nuisance", "fixed"):
        if not isinstance(found.get(role) or {}, dict):
            raise UserError(f"{role} in {path} is not a mapping", got=found[role], needed="optim.lr: [1e-4, 1e-2]")
    return found


def declare(cfg: config.Config, scientific: dict[str, Any], nuisance: dict[str, Any]) -> Space:
    """Return the space to search. Default: the peak rate of each stage. A nuisance setting without a range (None) gets the known one."""
    if not scientific and not nuisance:
        nuisance = dict.fromkeys(ranges.rates(cfg))
    known = ranges.known(cfg) if None in nuisance.values() else {}
    for name, given in nuisance.items():
        preset(cfg, name)  # raises for an unknown setting
        if given is None and name not in known:
            raise UserError(f"no range is known for {name}", needed=f"--nuisance {name}=LOW:HIGH, or {name}=A,B",
                            next="trainworthy sweep RECIPE --ranges")  # fmt: skip
    nuisance = {name: known[name] if given is None else given for name, given in nuisance.items()}
    for name in scientific:
        if name in nuisance:
            raise UserError(f"{name} is declared twice", got="scientific and nuisance", needed="one of them")
    return Space(
        tuple((name, tuple(values(cfg, name, given))) for name, given in scientific.items()),
        tuple(ranged(cfg, name, given) for name, given in nuisance.items()),
    )


def preset(cfg: config.Config, name: str) -> Any:
    """The value of `optim.lr` in the settings; an unknown name gets the nearest ones."""
    owner: Any = cfg
    known = config.flags(type(cfg))
    if name.replace("_", "-") not in known:
        raise config.unknown(f"setting {name} of the sweep", name.replace("_", "-"), known)
    for part in name.replace("-", "_").split("."):
        owner = getattr(owner, part)
    return owner


def values(cfg: config.Config, name: str, given: Any) -> list:
    """Return the values to compare: `adamw,sgd`, or a list."""
    now = preset(cfg, name)
    rows = given if isinstance(given, list) else [w.strip() for w in str(given).split(",") if w.strip()]
    if len(rows) < 2:
        raise UserError(f"{name} has nothing to compare with", got=given, needed=f"two or more values: {name}=A,B")
    return [one(name, row, now) for row in rows]


def one(name: str, word: Any, now: Any) -> Any:
    """A value as JSON has it: a number where the setting is one."""
    if not isinstance(word, str):
        return word
    if isinstance(now, bool) or word.lower() in ("true", "false"):
        if word.lower() not in ("true", "false"):
            raise UserError(f"{name} is on or off", got=word, needed="true or false")
        return word.lower() == "true"
    if isinstance(now, (int, float)):
        try:
            return int(word) if isinstance(now, int) else float(word)
        except ValueError:
            raise UserError(f"{name} is a number", got=word, needed=f"one like {now}") from None
    return word


def ranged(cfg: config.Config, name: str, given: Any) -> Range:
    """`1e-4:1e-1`, `1e-4:1e-1:linear`, {low, high, log}, or a few values."""
    now = preset(cfg, name)
    scale = ""
    if isinstance(given, dict):
        if not {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
            raise UserError(f"the range of {name} cannot be read", got=given, needed="low and high; log is optional")
        ends = [given["low"], given["high"]]
        scale = "" if given.get("log") is None else "log" if given["log"] else "linear"
    elif isinstance(given, str) and ":" in given:
        *ends, scale = given.split(":") if given.count(":") == 2 else [*given.split(":"), ""]
    else:
        return Range(name, values=tuple(values(cfg, name, given)))
    unreadable = f"the range of {name} cannot be read"
    try:
        low, high = (float(e) for e in ends)
    except (TypeError, ValueError):
        raise UserError(unreadable, got=given, needed=f"--nuisance {name}=LOW:HIGH") from None
    if isinstance(now, (bool, str)) or scale not in ("", "log", "linear"):
        raise UserError(unreadable, got=given, needed="LOW:HIGH, LOW:HIGH:log or :linear of a number")
    log = scale == "log" or (not scale and is_log(name, low, high))
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        raise UserError(f"the range of {name} is empty", got=given, needed="low < high, and low > 0 on a log scale")
    return Range(name, low, high, log, isinstance(now, int))


def words(settings: dict[str, Any]) -> list[str]:
    """Return the settings as words for `trainworthy run`."""
    found: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            group, dot, last = flag.rpartition(".")
            found.append(f"--{flag}" if value else f"--{group}{dot}no-{last}")
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        else:
            found += [f"--{flag}", repr(value) if isinstance(value, float) else str(value)]
    return found
