"""One planted bug as a lesson: its loss curve next to the healthy one, a guess, its patch, and the gate that stops it."""

import difflib
import math
import random
import statistics
from pathlib import Path

from trainworthy.core.base.config import unknown
from trainworthy.core.base.errors import UserError
from trainworthy.core.bugs import suite
from trainworthy.core.bugs.campaign import Campaign
from trainworthy.core.bugs.outcomes import Checked, Row, named
from trainworthy.core.bugs.suite import Case
from trainworthy.core.recipe.forks import without_note
from trainworthy.core.recipe.registry import find
from trainworthy.core.report.charts import LIGHT, Chart, render

WIDTH, HEIGHT = 64, 12  # characters of the plot in the terminal


def choose(recipe: str, bug: str, draws: random.Random) -> tuple[Case, list[Case]]:
    """Return the named bug (or a random one), and four bugs to guess from, including it."""
    known = [c for c in suite.cases([recipe], ["planted"]) if not c.known]
    if not known:
        needed = "a recipe with planted bugs"
        raise UserError(f"{recipe} has no planted bugs", needed=needed, next="trainworthy break vision/classify")
    if bug and bug not in {c.id for c in known}:
        raise unknown(f"bug '{bug}' of {recipe}", bug, {c.id for c in known})
    case = next((c for c in known if c.id == bug), None) or draws.choice(known)
    others = [c for c in known if c.gate != case.gate] or [c for c in known if c is not case]
    offered = [case, *draws.sample(others, min(3, len(others)))]
    draws.shuffle(offered)
    return case, offered


def runs(campaign: Campaign, case: Case, seed: int, steps: int) -> tuple[Path, Row, Row]:
    """Run the recipe and its fork with the bug for a few steps without gates; return (the fork, healthy run, run with the bug)."""
    folder = campaign.home
    healthy, broken = folder / "healthy.py", folder / "broken.py"
    suite.fork(case.recipe, healthy)
    suite.fork(case.recipe, broken, (case.old, case.new))
    found = campaign.short(folder, [str(healthy), str(broken)], [seed], steps, own={str(broken): case.argv})
    return broken, *(next(iter(found[str(f)].values())) for f in (healthy, broken))


def plot(healthy: list[float], broken: list[float]) -> str:
    """Draw two loss curves with characters: `.` healthy, `*` with the bug, `#` both."""
    length = max(len(healthy), len(broken))
    finite = [v for v in (*healthy, *broken) if math.isfinite(v)]
    if not finite:
        return "  (no finite loss)"
    log = min(finite) > 0 and max(finite) / min(finite) > 50
    low, high = (math.log(f(finite)) if log else f(finite) for f in (min, max))
    width = min(WIDTH, length)
    rows = [[" "] * width for _ in range(HEIGHT)]
    for values, mark in ((healthy, "."), (broken, "*")):
        for column in range(width):
            part = values[column * length // width : max(column * length // width + 1, (column + 1) * length // width)]
            part = [v for v in part if math.isfinite(v)]
            if part:
                mean = statistics.fmean(part)
                share = ((math.log(mean) if log else mean) - low) / ((high - low) or 1.0)
                y = HEIGHT - 1 - round(share * (HEIGHT - 1))
                rows[y][column] = "#" if rows[y][column] not in (" ", mark) else mark
    labels = {0: f"{max(finite):.3g}", HEIGHT - 1: f"{min(finite):.3g}"}
    lines = [f"{labels.get(y, ''):>9} |{''.join(row).rstrip()}" for y, row in enumerate(rows)]
    lines.append(f"{'':>9} +{'-' * width}\n{'':>11}step 1{f'step {length}':>{max(1, width - 6)}}")
    return "\n".join(lines) + f"\n{'':>11}. healthy   * with the bug   # both{'   (log scale)' if log else ''}"


def picture(path: Path, recipe: str, healthy: list[float], broken: list[float]) -> None:
    """Write the two curves as a PNG or SVG, by the suffix of `path`."""

    def draw(axes, colours: dict[str, str]) -> None:
        for values, name, colour in ((healthy, "healthy", "line"), (broken, "with the bug", "second")):
            axes.plot(range(1, len(values) + 1), values, color=colours[colour], label=name)
        axes.set_ylabel("training loss", color=colours["muted"])

    chart = Chart("curves", f"{recipe} with a planted bug", draw)
    path.write_bytes(render(chart, LIGHT, path.suffix[1:]))


def ending(run: Row) -> str:
    if run["crashed"] or run["stopped"]:
        return run["crashed"] or f"stopped itself: {run['stopped']}"
    loss = f"loss {run['losses'][0]:.4g} -> {run['losses'][-1]:.4g}, " if run["losses"] else "no update, "
    return loss + f"{run['metric']} {run['metrics'][run['metric']]:.4g}"


def patch(case: Case, broken: Path) -> str:
    """Return what was changed: the diff, and the settings."""
    old, new = find(case.recipe).path.read_text(), without_note(broken.read_text())
    lines = list(difflib.unified_diff(old.splitlines(), new.rstrip("\n").splitlines(), lineterm="", n=1))[2:]
    return "\n".join([*lines, *([f"settings: {' '.join(case.argv)}"] if case.argv else [])])


def stopped_by(campaign: Campaign, case: Case, broken: Path, seed: int) -> Checked:
    """Check the fork with the gate that should stop it; if that passes, with every gate."""
    checked = campaign.check(broken, seed, case.argv, [*case.before, case.gate])
    return checked if checked.failed else campaign.check(broken, seed, case.argv)


def reason(case: Case, checked: Checked) -> list[str]:
    if not checked.failed:
        return [f"no gate stops it (exit {checked.code}): {checked.note or 'every gate passed'}"]
    v = next((v for v in checked.failed if v["id"] == case.gate), checked.failed[0])
    lines = [f"stopped by the gate `{v['id']}` ({v['rows']}): {v['title']}", f"  measured       {v['measured']}",
             f"  needed         {v['needed']}"]  # fmt: skip
    lines += [f"  {'likely causes' if i == 0 else '':<14} {text}" for i, text in enumerate(v["remedy"].splitlines())]
    return lines if named(case.words, v) else [*lines, "  (the message does not name this cause)"]
