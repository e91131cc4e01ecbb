"""Gates and monitors on the page: a table of verdicts and their evidence, with plots where useful."""

import json
import math
from typing import Any

import numpy as np
from trainworthy.core.report.bands import OVERFIT, healthy
from trainworthy.core.report.charts import SMALL, Chart, drawing, plain_powers, shade, thin
from trainworthy.core.report.folder import Folder
from trainworthy.core.report.html import bars, details, esc, num, picture, tag, words

KIND = {"pass": "good", "fail": "bad"}


def verdict_table(f: Folder, verdicts: list[dict[str, Any]], *, of: str = "Gate") -> str:
    """One row per verdict. Causes and evidence of a verdict that is no pass follow at full width."""
    head = "".join(tag("th", h, scope="col") for h in ("Verdict", of, "Measured", "Needed", "Cost"))
    rows, several = [], len({v.get("stage") for v in verdicts}) > 1
    raised: dict[str, str] = {}  # an exception, and the first gate that it ended
    for v in verdicts:
        kind = KIND.get(v["verdict"], "warn")
        name = f"{v['stage']} · {v['id']}" if several else v["id"]
        title = f"{tag('span', esc(name), class_='id')} {tag('span', esc(v['rows']), class_='dim')}{tag('p', esc(v['title']))}"
        why = tag("p", esc(f"{v['verdict']}: {v['reason']}"), class_="warn") if v["reason"] else ""
        first = raised.setdefault(v["measured"], name) if "traceback" in (v.get("evidence") or {}) else name
        repeated, findings = first != name, evidence(f, v)
        broken = v["verdict"] in ("fail", "waived", "advice") and not repeated
        text = f"raised what {first} raised" if repeated else v["measured"]
        measured = tag("p", esc(text)) + why + ("" if broken else details("Evidence", findings) if findings else "")
        cost = f"passed on {v['remembered']}" if v.get("remembered") else f"{v['seconds']:.1f} s"
        cells = "".join(tag("td", c) for c in (title, measured, esc(v["needed"]), esc(cost)))
        rows.append(tag("tr", tag("th", tag("span", esc(v["verdict"]), class_=f"pill {kind}"), scope="row") + cells))
        if broken:
            causes = tag("ul", "".join(tag("li", words(x)) for x in v["remedy"].splitlines()), class_="causes")
            causes = tag("p", "Likely causes, in order", class_="dim") + causes if v["remedy"] else ""
            fold = causes + (details("Evidence", findings, is_open=v["verdict"] == "fail") if findings else "")
            fold = fold and tag("td", tag("div", fold, class_=f"card failure {kind}"), colspan=5)
            rows.append(fold and tag("tr", fold))
    return tag("table", f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>", class_="gates")


def evidence(f: Folder, v: dict[str, Any]) -> str:
    blocks = []
    stage = f.path / "stages" / (v.get("stage") or "")
    image = (stage if stage.is_dir() and v.get("stage") else f.path) / "gates" / v["id"] / "batch.png"
    if image.is_file():
        batch = picture(image.read_bytes(), f"the batch that {v['id']} used", side=900)
        blocks.append(tag("figure", batch + tag("figcaption", "The batch that it used")))
    found = dict(v.get("evidence") or {})
    for keys, draw in DRAWN:
        if all(k in found for k in keys):
            blocks.append(draw(f, v, *(found.pop(k) for k in keys)))
    if found:
        plain = json.loads(json.dumps(found, default=str), parse_float=lambda x: float(f"{float(x):.4g}"))
        text = json.dumps(plain)
        text = text if len(text) < 4000 else text[:4000] + " ... (all of it in gates.json)"
        blocks.append(tag("pre", esc(text), tabindex="0"))
    return tag("div", "".join(blocks), class_="evidence") if any(blocks) else ""


def drawn(chart: Chart, words: str) -> str:
    return tag("figure", drawing(chart, words) + tag("figcaption", esc(words)))


def finite(values: list[Any]) -> np.ndarray:
    """Numbers as floats; anything else becomes nan."""
    return np.array([v if isinstance(v, (int, float)) else math.nan for v in values], float)


def _curve(f: Folder, v: dict[str, Any], curve: list[Any]) -> str:
    """The probe over its steps, [(step, value, ...)] or [value]; for the overfit gate, with the band of healthy
    runs."""
    pairs = [c[:2] if isinstance(c, (list, tuple)) else (i + 1, c) for i, c in enumerate(curve)]
    x, y = finite([p[0] for p in pairs]), finite([p[1] for p in pairs])
    if len(x) < 2:
        return ""
    known = healthy(f) if v["id"] == "overfit" else None
    band = known.bands.get(OVERFIT) if known else None
    words = f"Probe, {num(y[0])} to {num(y[-1])} at {num(int(x[-1]))}."
    if band:
        left = next((d for d in known.departures(f) if d.tag == OVERFIT), None)
        words += f" {left.words[:1].upper()}{left.words[1:]}." if left else " Within the band of healthy runs."

    def draw(axes: Any, c: dict[str, str]) -> None:
        shade(axes, c, band and (band, known.seeds))
        axes.plot(*thin(x, y), "-o", color=c["line"], markersize=2.4)

    return drawn(Chart(f"gate-{v['id']}", "Probe over steps", draw, size=SMALL), words)


def _range_test(f: Folder, v: dict[str, Any], rates: list[float], losses: list[float]) -> str:
    """Loss over learning rate, the usable range, and this run's rate."""
    x, y = finite(rates), finite(losses)
    if np.isfinite(y).sum() < 2:
        return ""
    found, lr = v["evidence"], f.settings.get("optim", {}).get("lr")
    smoothed = finite(found.get("smoothed", []))

    def draw(axes: Any, c: dict[str, str]) -> None:
        axes.plot(x, y, color=c["line"], alpha=0.35 if len(smoothed) else 1)
        axes.plot(x[: len(smoothed)], smoothed, color=c["line"])
        axes.set_xscale("log")
        plain_powers(axes.xaxis)
        axes.set_xlabel("learning rate", color=c["muted"])
        if "low" in found:
            high = min(found["high"], x[-1])
            axes.axvspan(found["low"], high, color=c["good"], alpha=0.18, linewidth=0, label="the loss falls")
        if lr:
            axes.axvline(lr, color=c["second"], linestyle=(0, (4, 3)), linewidth=0.9, label=f"set: {lr:g}")
        low, start = float(np.nanmin(y)), float(y[np.isfinite(y)][0])
        axes.set_ylim(low - 0.1 * (start - low), start + 0.5 * (start - low) if start > low else None)

    words = f"Loss while the rate rises from {x[0]:.1e} to {x[-1]:.1e}, lowest at {x[int(np.nanargmin(y))]:.1e}."
    return drawn(Chart(f"gate-{v['id']}", "Range test", draw, size=SMALL), words)


def _shares(_f: Folder, _v: dict[str, Any], gradient: dict[str, float], loss: dict[str, float]) -> str:
    each = {"Share of the gradient": gradient, "Share of the loss": loss}
    return "".join(bars([(k, x, "other") for k, x in s.items()], high=1.0, caption=t) for t, s in each.items())


DRAWN = [
    (("traceback",), lambda _f, _v, lines: tag("pre", esc("".join(lines)), tabindex="0")),
    (("curve",), _curve),
    (("rates", "losses"), _range_test),
    (("gradient", "loss"), _shares),
]
