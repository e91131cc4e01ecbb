"""What a study found: the best trial of each scientific combination, whether a range was too short, and what follows from it."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from trainworthy.core.monitoring import cost
from trainworthy.core.report import intervals
from trainworthy.core.sweep.space import EDGE, Range, Space

FEW = 4
"""A best trial at the edge of a range is reported once its combination has so many finished trials."""


@dataclass
class Row:
    """A trial as the page shows it."""

    number: int
    point: dict[str, Any]
    state: str
    """done, infeasible or running."""
    value: float | None = None
    values: list[float] = field(default_factory=list)
    reason: str = ""
    diagnosis: str = ""
    seconds: float = 0.0
    cost: dict[str, Any] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """The value of a trial that is done."""
        assert self.value is not None, self.state
        return self.value


@dataclass
class Edge:
    """The best trial is at the end of a range: the best value may be beyond it."""

    name: str
    value: float
    up: bool
    wider: Range
    of: str = ""
    """The scientific combination."""
    near: bool = True
    """Within a tenth of the range's end; else only beyond every other trial."""

    def words(self) -> str:
        of = f" of {self.of}" if self.of else ""
        where = f"the {'highest' if self.up else 'lowest'} tried"
        if self.near:
            where = f"at the {'upper' if self.up else 'lower'} end of its range"
        return (f"The best trial{of} has {self.name} {self.value:.3g}, {where}: "
                f"the best value may be beyond it. Wider range: --nuisance {self.wider.words()}")  # fmt: skip


@dataclass
class Findings:
    """Content of the page and of the command's last lines."""

    metric: str
    higher: bool
    space: Space
    rows: list[Row]
    best: Row | None = None
    each: list[tuple[dict[str, Any], Row | None, int]] = field(default_factory=list)
    """(scientific combination, its best trial, its finished trials), in the order they were declared."""
    edges: list[Edge] = field(default_factory=list)
    floor: float | None = None
    """Score of chance, where it is known."""
    wider_command: str = ""
    """Searches again with every range that was too short made wider."""

    @property
    def cost(self) -> dict[str, Any]:
        """Of every trial that has ended, infeasible ones, too."""
        return cost.together([r.cost for r in self.rows if r.cost])


def rows_of(study: Any) -> list[Row]:
    """Every started trial, by number."""
    found = []
    for t in study.get_trials(deepcopy=False):
        a = t.user_attrs
        state = {"COMPLETE": "done", "RUNNING": "running"}.get(t.state.name, "infeasible")
        value = t.value if state == "done" else None
        found.append(Row(t.number, dict(t.params), state, value, a.get("values", []), a.get("reason", ""), a.get("diagnosis", ""),
                         a.get("seconds", 0.0), a.get("cost", {})))  # fmt: skip
    return found


def find(study: Any, space: Space, metric: str, higher: bool) -> Findings:
    f = Findings(metric, higher, space, rows_of(study))
    done = [r for r in f.rows if r.state == "done"]
    for chosen in space.compared:
        mine = rows_with(chosen, done)
        f.each.append((chosen, best_of(mine, higher), len(mine)))
    f.best = best_of(done, higher)
    for chosen, best, n in f.each:
        tried = [r for r in rows_with(chosen, f.rows) if r.state != "running"]
        if best is not None and n >= FEW:
            edges = [e for one in space.nuisance if (e := at_edge(one, best, tried))]
            f.edges += [replace(e, of=describe(chosen)) for e in edges]
    return f


def rows_with(chosen: dict[str, Any], rows: list[Row]) -> list[Row]:
    """Return the trials of one scientific combination."""
    return [r for r in rows if all(r.point.get(k) == v for k, v in chosen.items())]


def best_of(rows: list[Row], higher: bool) -> Row | None:
    """Return the best trial; of several, the first."""
    return max(rows, key=lambda r: (r.score if higher else -r.score, -r.number), default=None)


def at_edge(one: Range, best: Row, tried: list[Row]) -> Edge | None:
    """Return the edge if the best trial is within a tenth of an end of the range, or beyond every other trial, failed ones included."""
    if one.values:
        return None
    x, others = one.share(best.point[one.name]), [one.share(r.point[one.name]) for r in tried if r is not best]
    for up, near, last in (
        (True, x > 1 - EDGE, all(x > o for o in others)),
        (False, x < EDGE, all(x < o for o in others)),
    ):
        if near or last:
            beyond = [o for o in others if (o > x if up else o < x)]
            if near and beyond and len(beyond) >= 3:  # worse ones lie beyond: the best is inside
                continue
            wider = one.wider(up=up)
            if wider == one:  # a share of 1 has no more room
                return None
            return Edge(one.name, best.point[one.name], up, wider, near=near)
    return None


def wider(f: Findings) -> Space | None:
    """Return the space with every range that was too short made wider; None if none was."""
    if not f.edges:
        return None
    found = []
    for one in f.space.nuisance:
        each = [one, *(e.wider for e in f.edges if e.name == one.name)]
        found.append(replace(one, low=min(w.low for w in each), high=max(w.high for w in each)))
    return replace(f.space, nuisance=tuple(found))


def is_at_chance(f: Findings) -> bool:
    """Return whether the best trial is no better than chance."""
    if f.best is None or f.floor is None or not math.isfinite(f.floor):
        return False
    return (1 if f.higher else -1) * (f.best.score - f.floor) <= 0


def cautions(f: Findings) -> list[str]:
    """Return reasons against choosing the best trial: it learnt nothing, or others have the same score."""
    if f.best is None:
        return []
    found = []
    if is_at_chance(f):
        found.append(f"No trial is better than chance ({f.floor:.4f}): nothing was learnt, so no trial can be chosen. Train longer "
                     "(--train.epochs, --max-steps), or search other settings.")  # fmt: skip
    same = sum(r.state == "done" and r.value == f.best.value and r is not f.best for r in f.rows)
    if same:
        trials = "1 other trial has" if same == 1 else f"{same} other trials have"
        found.append(f"{trials} exactly the same score. The first of them was taken.")
    return found


def describe(point: dict[str, Any]) -> str:
    """optim.name adamw, model small"""
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in point.items())


def comparison(f: Findings) -> list[str]:
    """Conclusions of the scientific settings: best against best, with intervals where there are seeds."""
    known = [(chosen, best) for chosen, best, _ in f.each if best is not None]
    if len(f.each) < 2:
        return []
    if len(known) < 2:
        return ["Fewer than two of the compared settings have a finished trial: there is no comparison yet."]
    known.sort(key=lambda pair: pair[1].score, reverse=f.higher)
    (a, first), (b, second) = known[0], known[1]
    if first.score == second.score and not any(set(r.values) - {first.score} for r in (first, second)):
        text = f"{describe(a)} and {describe(b)} have exactly the same {f.metric}, {first.score:.4f}"
        return [f"{text}: the trials show no difference."]
    text = f"{describe(a)} is ahead of {describe(b)} by {abs(first.score - second.score):.4f} {f.metric}, each at its own best nuisance settings."
    if min(len(first.values), len(second.values)) < 2:
        text += " With one seed for each trial there is no interval."
        return [f"{text} Run both with `trainworthy run --seeds 5`, then compare them."]
    d = intervals.welch(second.values, first.values)
    verdict = "excludes 0" if d.real else "includes 0: these seeds do not show a difference"
    return [f"{text} 95% interval of the difference {d.low:+.4f} to {d.high:+.4f} (Welch over seeds): it {verdict}. Both are the best of "
            "several trials, so the interval is too narrow: confirm with new seeds."]  # fmt: skip
