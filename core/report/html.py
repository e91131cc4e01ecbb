"""HTML helpers. Everything that comes from a file goes through `esc`."""

import base64
import io
import math
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base import masking


def esc(value: Any) -> str:
    """Escape text for the page, and mask anything that looks like an access token."""
    return escape(masking.SECRET.sub(masking.HIDDEN, str(value)))


def words(text: str) -> str:
    """Return text for HTML; what is in backticks becomes code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", esc(text))


def num(value: Any, sign: str = "") -> str:
    """Format a number: four decimals near one, thousands separated, powers of ten for very large or small values."""
    if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
        return str(value)
    v = float(value)
    if not math.isfinite(v) or v == 0:
        return ("±0" if sign else "0") if v == 0 else str(v)
    if isinstance(value, (int, np.integer)) or (v.is_integer() and 10 <= abs(v) < 1e9):
        return f"{int(v):{sign},}"
    if abs(v) >= 1e6 or abs(v) < 1e-4:
        return f"{v:{sign}.1e}"
    return f"{v:{sign}.4f}" if abs(v) < 10 else f"{v:{sign},.1f}"


def tag(name: str, inner: str = "", **attrs: Any) -> str:
    """Return one element. `inner` is HTML, attributes are escaped; class_ and data_x as in other Python builders."""
    words = "".join(f' {k.rstrip("_").replace("_", "-")}="{esc(v)}"' for k, v in attrs.items() if v is not None)
    return f"<{name}{words}>" if name in ("img", "br", "meta") else f"<{name}{words}>{inner}</{name}>"


def table(head: Iterable[str], rows: Iterable[list[str]], *, class_: str = "", caption: str = "") -> str:
    """A table of HTML cells; the first cell of a row is its header."""
    top = "".join(tag("th", h, scope="col") for h in head)
    body = "".join("<tr>" + tag("th", r[0], scope="row") + "".join(tag("td", c) for c in r[1:]) + "</tr>" for r in rows)
    title = tag("caption", caption) if caption else ""
    head_html = f"<thead><tr>{top}</tr></thead>" if top else ""
    wide = {"tabindex": 0, "role": "region", "aria_label": class_} if class_ in ("predictions", "matrix") else {}
    return tag("div", tag("table", f"{title}{head_html}<tbody>{body}</tbody>", class_=class_), class_="scroll", **wide)


def bars(rows: list[tuple[str, float, str]], *, high: float | None = None, caption: str = "") -> str:
    """Horizontal bars (label, value, class) with numbers; a bar starts at zero, also for negative values."""
    finite = [v for _, v, _ in rows if math.isfinite(v)]
    lo, hi = min([0.0, *finite]), max([0.0, high or 0.0, *finite])
    span = (hi - lo) or 1.0
    cells = []
    for label, v, kind in rows:
        w = abs(v) / span if math.isfinite(v) else 0.0
        style = f"--x:{100 * (min(v, 0) - lo) / span if w else 0:.2f}%;--w:{100 * w:.2f}%"
        cells.append([esc(label), tag("span", "", class_=f"bar {kind}", style=style), esc(num(v))])
    return table((), cells, class_="bars", caption=esc(caption))


def picture(source: bytes | np.ndarray, alt: str, *, side: int = 192) -> str:
    """An image as a data URI. Large ones are averaged down to keep the page small; small ones keep their pixels."""
    from matplotlib import image

    if not isinstance(source, bytes) or len(source) >= 24_000:
        a = image.imread(io.BytesIO(source)) if isinstance(source, bytes) else np.asarray(source) / 255.0
        k = max(1, math.ceil(max(a.shape[:2]) / side))
        h, w = (n // k * k for n in a.shape[:2])
        a = a[:h, :w].reshape(h // k, k, w // k, k, *a.shape[2:]).mean((1, 3)) if h and w else a
        out = io.BytesIO()
        image.imsave(out, np.clip(a, 0, 1), cmap="gray", vmin=0, vmax=1, format="png")
        source = out.getvalue()
    return tag("img", src="data:image/png;base64," + base64.b64encode(source).decode(), alt=alt, loading="lazy")


def details(summary: str, inner: str, *, is_open: bool = False) -> str:
    """A collapsible block that works without scripts."""
    return f"<details{' open' if is_open else ''}>{tag('summary', summary)}{inner}</details>"


def section(title: str, inner: str, lead: str = "") -> str:
    """A section of the page, or nothing if it has no content."""
    anchor = re.sub(r"\W+", "-", title.lower()).strip("-")
    return tag("section", tag("h2", esc(title)) + (note(lead) if lead else "") + inner, id=anchor) if inner else ""


def card(title: str, inner: str) -> str:
    return tag("div", tag("h3", esc(title)) + inner, class_="card")


def note(text: str) -> str:
    return tag("p", esc(text), class_="note")


def pill(kind: str, text: str) -> str:
    """A verdict in a coloured frame; `kind` is good, warn or bad."""
    mark = tag("span", {"good": "✓", "warn": "!", "bad": "✕"}[kind], aria_hidden="true")
    return tag("p", mark + esc(text), class_=f"pill {kind}")


def code(command: str) -> str:
    return tag("pre", tag("code", esc(command)), class_="command")


def page(title: str, hero: str, body: str, name: str, *, nav: str = "") -> str:
    """A whole page; `name` is in its footer."""
    return PAGE.format(title=esc(title), style=STYLE, hero=hero, nav=nav, body=body, name=esc(name))


STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
{hero}
{nav}
<main id="main">{body}</main>
<footer>Trainworthy · {name}</footer>
</body>
</html>
"""
