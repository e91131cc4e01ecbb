"""Curves: inline SVG in the page's colours (light and dark), and PNG files in plots/."""

import io
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from trainworthy.core.report.bands import OUTSIDE, OVERFIT, Band, Healthy, banded_curves, healthy, name_of, smooth, thin
from trainworthy.core.report.folder import Folder, references, series
from trainworthy.core.report.html import esc, num, tag

SMALL = (3.4, 2.0)  # inches: a third of the page


LIGHT = {
    "line": "#3451b2", "second": "#b45309", "good": "#0f766e", "ink": "#1d2127", "muted": "#5f6670", "grid": "#e3e4e1",
}  # fmt: skip
SENTINEL = {k: f"#f1e2d{i}" for i, k in enumerate(LIGHT)}  # unique placeholder colours, replaced by var(--...)


@dataclass
class Chart:
    """One plot: `draw(axes, colours)` draws it for the page and for the file."""

    name: str
    title: str
    draw: Callable[[Any, dict[str, str]], None]
    note: str = ""
    size: tuple[float, float] = (4.2, 2.3)

    def __post_init__(self):
        self.name = file_name(self.name)


def file_name(name: str) -> str:
    """Return `name` as a file name and id prefix: letters, digits, dots and dashes. A hash keeps replaced names unique,
    so that two metrics never share a file."""
    plain = re.sub(r"[^\w.-]+", "-", name)[:80].strip(".")
    return plain if plain == name else f"{plain}-{zlib.crc32(name.encode()):08x}"


def render(chart: Chart, colours: dict[str, str], kind: str) -> bytes:
    """Render the chart as SVG or PNG with fixed settings, independent of the user's matplotlib style."""
    import matplotlib
    from matplotlib.figure import Figure

    own = {
        "svg.fonttype": "none", "svg.hashsalt": chart.name, "font.size": 8, "font.family": "DejaVu Sans", "lines.linewidth": 1.3,
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "text.parse_math": False,
        **{f"{x}tick.{size}.size": 0 for x in "xy" for size in ("major", "minor")},
    }  # fmt: skip
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(own)
        figure = Figure(figsize=chart.size, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(axis="y", color=colours["grid"], linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["left", "bottom"]].set_color(colours["grid"])
        axes.tick_params(which="both", colors=colours["muted"])
        axes.set_xlabel("step", color=colours["muted"])
        chart.draw(axes, colours)
        if axes.get_xlabel() == "step":
            whole_steps(axes)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend(frameon=False, labelcolor=colours["ink"], fontsize=8, handlelength=1.2)
        out = io.BytesIO()
        if kind == "png":
            # The figure's, not the axes': above a legend that is above the axes
            figure.suptitle(chart.title, color=colours["ink"], x=0.02, ha="left", size="medium")
        more = {"transparent": True, "metadata": {"Date": None}} if kind == "svg" else {}
        figure.savefig(out, format=kind, dpi=160, **more)
    return out.getvalue()


def whole_steps(axes: Any) -> None:
    """Put the ticks of the step axis at whole steps. A curve of a single point is drawn near the end of an axis from 0."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))
    low, high = axes.dataLim.intervalx
    if low == high:
        axes.set_xlim(0, 1.2 * high or 1)


def inline(svg: str, name: str, alt: str) -> str:
    """Adapt matplotlib's SVG to the page: no prolog or metadata, own ids, coordinates with one decimal, the page's
    fonts and colours."""
    noise = r"<metadata>.*?</metadata>|<!--.*?-->|\s+xmlns(:\w+)?=\"[^\"]*\""
    svg = re.sub(noise, "", svg[svg.index("<svg") :], flags=re.S)
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"(url\(#|xlink:href=\"#)([\w-]+)", lambda m: f"{m[1].removeprefix('xlink:')}{name}-{m[2]}", svg)
    short = lambda m: f"{float(m[0]):.1f}".removesuffix(".0")  # noqa: E731
    svg = re.sub(r'(?<= )(d|x|y|transform|points)="[^"]*"', lambda m: re.sub(r"-?\d+\.\d{2,}", short, m[0]), svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for k, colour in SENTINEL.items():
        svg = svg.replace(colour, f"var(--{k})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{esc(alt)}" ', 1)


def drawing(chart: Chart, alt: str = "") -> str:
    """The chart as inline SVG. `alt`: its words for readers who cannot see it; default: its title."""
    return inline(render(chart, SENTINEL, "svg").decode(), chart.name, alt or chart.title)


def chart_card(chart: Chart) -> str:
    return tag("figure", tag("h3", esc(chart.title)) + drawing(chart), class_="card")


def shade(axes: Any, c: dict[str, str], band: tuple[Band, int] | None) -> None:
    """Draw the band of the healthy runs behind the curve."""
    if band:
        b, seeds = band
        label = f"healthy runs, {seeds} seeds"
        axes.fill_between(b.x, b.low, b.high, color=c["good"], alpha=0.25, linewidth=0, label=label)


def charts(f: Folder, known: Healthy | None) -> list[Chart]:
    """Return the curves for which this folder has numbers."""
    shades = {k: (b, known.seeds) for k, b in known.bands.items()} if known else {}
    made = [_loss_chart(f, shades), _metric_chart(f, shades), _rate_chart(f), _norm_chart(f, shades)]
    x, y = series(f.steps, "step/samples_per_sec")
    if len(x) > 1:
        rate = float(np.nanmedian(y))
        top = 1.3 * float(np.nanpercentile(smooth(x, y)[1], 98))
        made.append(Chart("speed", "Samples per second", lambda a, c: (a.plot(*smooth(x, y), color=c["line"]),
                          a.set_ylim(0, top)), f"Median {rate:,.0f}.", SMALL))  # fmt: skip
    for key in f.steps[-1] if f.steps else {}:  # values that the loop logs besides its losses: step/<group>/<name>
        if key.count("/") == 2 and not key.startswith("step/lr/"):
            made.append(_logged_chart(f, key))
    figures = f.summary.get("figures", {}).items()
    made += [_points(title, figure) for title, figure in figures if "x" in figure]
    return [m for m in made if m]


def _logged_chart(f: Folder, key: str) -> Chart:
    x, y = series(f.steps, key)
    name = key.removeprefix("step/")

    def draw(axes: Any, c: dict[str, str]) -> None:
        axes.plot(*smooth(x, y), color=c["line"])

    return Chart(name.replace("/", "-"), name, draw, f"Newest {y[-1]:.4g}.", SMALL)


def _points(title: str, figure: dict[str, Any]) -> Chart:
    x, y, error = (np.array(figure[k], float) if figure[k] is not None else None for k in ("x", "y", "error"))
    name = re.sub(r"\W+", "-", title.lower()).strip("-")
    named = figure.get("named", {})  # older folders have none

    def draw(axes: Any, c: dict[str, str]) -> None:
        if figure["diagonal"]:
            ends = [min(x.min(), y.min()), max(x.max(), y.max())]
            axes.plot(ends, ends, "--", color=c["muted"], linewidth=0.8)
        colours = [c[k] for k in ("line", "second", "good", "muted")]
        for i, (label, values) in enumerate(named.items()):
            axes.plot(x, np.array(values, float), ".-", color=colours[i % 4], label=label)
        if not named:
            axes.errorbar(x, y, error, fmt="o", markersize=3, color=c["line"], elinewidth=0.8)
        axes.set_xlabel(figure["axes"][0], color=c["muted"])
        axes.set_ylabel(figure["axes"][1], color=c["muted"])

    return Chart(name, title, draw, figure["note"])


Shades = dict[str, tuple[Band, int]]
"""Tag -> (band of the healthy runs, number of their seeds)"""


def _loss_chart(f: Folder, shades: Shades) -> Chart | None:
    x, y = series(f.steps, "step/loss")
    if len(x) < 2:
        return None
    val = f.val_loss
    terms = [k for k in f.steps[-1] if k.startswith("step/") and k not in ("step/loss", "step/grad_norm", "step/samples_per_sec")
             and k.count("/") == 1 and k != "step/lr"][:3]  # fmt: skip

    def draw(axes: Any, c: dict[str, str]) -> None:
        shade(axes, c, shades.get("step/loss"))
        axes.plot(*thin(x, y), color=c["line"], alpha=0.22, linewidth=0.5)
        axes.plot(*smooth(x, y), color=c["line"], label="training, smoothed")
        for term, style in zip(terms, ("--", ":", "-."), strict=False):
            label = term.removeprefix("step/")
            axes.plot(*smooth(*series(f.steps, term)), style, color=c["muted"], linewidth=1, label=label)
        if val:
            axes.plot(*thin(*series(f.rows, val)), "o", markersize=2.6, color=c["second"], label=val)
        good = y[np.isfinite(y)]
        if len(good) and good.min() > 0 and good.max() / good.min() > 30:
            axes.set_yscale("log")
            plain_powers(axes.yaxis)

    note = "Faint: single steps. " + (f"{val} may leave out what training adds (smoothing, penalties)." if val else "")
    return Chart("loss", "Loss", draw, note)


def _metric_chart(f: Folder, shades: Shades) -> Chart | None:
    s = f.summary
    x, y = series(f.rows, f"val/{s.get('metric')}")
    if not np.isfinite(y).any():
        return None
    best = int(np.nanargmax(y if s.get("higher_is_better", True) else -y))
    known = sorted(references(s), key=lambda r: -r[1])
    band = shades.get(f"val/{s['metric']}")
    levels = [v for _, v in known] + [float(np.nanmin(y)), float(np.nanmax(y))]
    levels += [float(band[0].low.min()), float(band[0].high.max())] if band else []
    if max(levels) == min(levels):  # one value is no scale
        levels.append(float(s.get("ceiling") or 0) if s.get("ceiling") != levels[0] else levels[0] - 1)
    if max(levels) == min(levels):
        levels.append(levels[0] + 1)
    near = 0.07 * (max(levels) - min(levels))
    groups: list[list[tuple[str, float]]] = []  # lines too close together share a label
    for label, v in known:
        if groups and groups[-1][0][1] - v <= near:
            groups[-1].append((label, v))
        else:
            groups.append([(label, v)])

    def draw(axes: Any, c: dict[str, str]) -> None:
        for group in groups:
            (label, top), more = group[0], f" and {len(group) - 1} more" if len(group) > 1 else ""
            away = 0 <= y[best] - top < 2 * near and x[best] > 0.6 * x[-1]  # from the label of the best
            below = away or top > (min(levels) + max(levels)) / 2  # away from the frame
            axes.annotate(f"{label} {num(top)}{more}", (1, group[-1][1] if below else top), xytext=(0, -2 if below else 2),
                          xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", fontsize=7.5,
                          va="top" if below else "bottom", color=c["muted"])  # fmt: skip
            for _, v in group:
                axes.axhline(v, color=c["muted"], linestyle=(0, (4, 3)), linewidth=0.8)
        shade(axes, c, band)
        axes.plot(*thin(x, y), "-o", color=c["line"], markersize=2.4)
        axes.plot([x[best]], [y[best]], "o", color=c["good"], markersize=7, fillstyle="none", markeredgewidth=1.4)
        axes.annotate(f"best {num(float(y[best]))}", (x[best], y[best]), xytext=(0, 7), textcoords="offset points", ha="center",
                      fontsize=8, color=c["good"])  # fmt: skip
        axes.update_datalim([(x[best], v) for v in levels])
        axes.autoscale_view()
        axes.margins(y=0.14)
        if min(levels) > 0 and 0.9 < max(levels) < 1:
            _stretch(axes, min(levels), max(levels))

    words = f"Ring: best, step {x[best]:,.0f}."
    words += f" Dashed: {', '.join(f'{label} {num(v)}' for label, v in known)}." if known else ""
    return Chart("metric", f"{s['metric']} on held-out data", draw, words)


def plain_powers(axis: Any) -> None:
    """Show ticks of a logarithmic axis as plain numbers: matplotlib writes powers in math mode, which the page's style
    shows as source."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def _stretch(axes: Any, low: float, high: float) -> None:
    """Use a scale that stretches values near 1, so that 0.98 and 0.99 are visibly different."""
    axes.set_yscale("logit")
    ticks = [t for t in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 0.9999) if low / 2 < t < (1 + high) / 2]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low / 2, (2 + high) / 3)


def _rate_chart(f: Folder) -> Chart | None:
    names = [k for k in (f.steps[-1] if f.steps else {}) if k == "step/lr" or k.startswith("step/lr/")][:4]
    if not names or len(f.steps) < 2:
        return None
    peak = max(float(np.nanmax(series(f.steps, k)[1])) for k in names)

    def draw(axes: Any, c: dict[str, str]) -> None:
        for name, style in zip(names, ("-", "--", ":", "-."), strict=False):
            label = name.removeprefix("step/lr/") if len(names) > 1 else None
            axes.plot(*thin(*series(f.steps, name)), style, color=c["line"], label=label)

    optim = f.settings.get("optim", {})
    return Chart("rate", "Learning rate", draw, f"{optim.get('schedule', '')}, highest {peak:g}.".lstrip(", "), SMALL)


def _norm_chart(f: Folder, shades: Shades) -> Chart | None:
    x, y = series(f.steps, "step/grad_norm")
    if len(x) < 2:
        return None
    clip = float(f.settings.get("optim", {}).get("clip", "inf"))

    def draw(axes: Any, c: dict[str, str]) -> None:
        shade(axes, c, shades.get("step/grad_norm"))
        axes.plot(*thin(x, y), color=c["line"], alpha=0.22, linewidth=0.5)
        axes.plot(*smooth(x, y), color=c["line"])
        if math.isfinite(clip):
            axes.axhline(clip, color=c["second"], linestyle=(0, (4, 3)), linewidth=0.9, label=f"clipped above {clip:g}")
        top = 1.1 * np.nanpercentile(y[np.isfinite(y)], 99.5) if np.isfinite(y).any() else 0.0
        axes.set_ylim(0, top or None)

    cut = "No clipping." if "clip" in f.settings.get("optim", {}) else ""  # another tool's setting is not known
    cut = f"{np.mean(~(y <= clip)):.0%} of steps were clipped at {clip:g}." if math.isfinite(clip) else cut
    return Chart("norm", "Gradient norm, before clipping", draw, cut, SMALL)


def _against_chart(f: Folder, known: Healthy) -> Chart:
    """Plot every curve relative to its band, which is seldom wide enough to be visible at the curve's own scale."""
    found = {name_of(f, k): known.bands[k].place(*curve) for k, curve in banded_curves(f, known.total).items()
             if k in known.bands and k != OVERFIT}  # fmt: skip
    styles = (("line", "-"), ("muted", ":"), ("good", "-"), ("second", "-"))

    def draw(axes: Any, c: dict[str, str]) -> None:
        axes.axhspan(-1, 1, color=c["good"], alpha=0.25, linewidth=0, label=f"healthy runs, {known.seeds} seeds")
        for (name, (x, y)), (colour, style) in zip(found.items(), styles, strict=False):
            axes.plot(x, y, style, color=c[colour], linewidth=1.1, label=name)
        for edge in (-OUTSIDE, OUTSIDE):
            axes.axhline(edge, color=c["muted"], linestyle=(0, (4, 3)), linewidth=0.8)
        most = max(float(np.nanmax(np.abs(y))) for _, y in found.values())
        axes.set_ylim(*(sign * min(max(1.5 * OUTSIDE, 1.1 * most), 4 * OUTSIDE) for sign in (-1, 1)))
        axes.set_yticks([-OUTSIDE, -1, 1, OUTSIDE] if most < 2 * OUTSIDE else [-OUTSIDE, OUTSIDE])
        axes.legend(frameon=False, labelcolor=c["ink"], fontsize=8, handlelength=1.2, ncols=3, loc="lower left",
                    bbox_to_anchor=(0, 1))  # fmt: skip

    note = "Scaled so that the lowest and the highest healthy run are at -1 and 1. A curve beyond the dashed lines has left the band."
    return Chart("healthy", "Against the healthy runs", draw, note)


def curves(f: Folder) -> str:
    """Write every chart inline, and as a PNG under plots/."""
    known = healthy(f)
    parts = []
    for chart in charts(f, known):
        title, words = tag("h3", esc(chart.title)), tag("figcaption", esc(chart.note))
        parts.append(tag("figure", title + _both(f, chart) + words, class_="card"))
    if known and known.bands and parts:
        chart = _against_chart(f, known)
        words = tag("p", esc(known.words(f))) + tag("figcaption", esc(chart.note))
        title = tag("h3", esc(chart.title))
        parts.insert(2, tag("figure", _both(f, chart) + tag("div", title + words), class_="card wide"))
    return tag("div", "".join(parts), class_="charts") if parts else ""


def _both(f: Folder, chart: Chart) -> str:
    """Write the chart to plots/ and return it for the page."""
    plots = f.path / "plots"
    plots.mkdir(exist_ok=True)
    (plots / f"{chart.name}.png").write_bytes(render(chart, LIGHT, "png"))
    return drawing(chart, f"{chart.title}, by step. {chart.note}")
