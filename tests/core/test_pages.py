"""Report pages in a real browser, where one is installed: nothing is cut off on a phone, text is legible in light and in dark."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from trainworthy.core import report
from trainworthy.core.sweep import findings
from trainworthy.core.sweep import page as sweep_page
from trainworthy.core.sweep.space import Range, Space

from tests.core.test_report import folder, put  # noqa: F401  (folder: a fixture)

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

# In a frame, because a window has a least width; contrast as WCAG 2 defines it, where colours are opaque.
MEASURE = """
const of = (c) => { const m = c.match(/[\\d.]+/g).map(Number);
  return /^rgb/.test(c) ? {rgb: m.slice(0, 3), alpha: m.length > 3 ? m[3] : 1} : null; };
const light = (rgb) => { const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
function faint(doc) {
  const found = [];
  for (const e of doc.body.querySelectorAll("*")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || e.closest("svg") || !e.getClientRects().length) continue;
    let at = e, back = null;
    while (at && !(back = of(getComputedStyle(at).backgroundColor))?.alpha) { if (!back) break; at = at.parentElement; }
    const ink = of(getComputedStyle(e).color);
    if (!back || back.alpha < 1 || !ink || ink.alpha < 1) continue;
    const [a, b] = [light(ink.rgb), light(back.rgb)].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) found.push(`${e.tagName}.${e.className} ${getComputedStyle(e).color} on ${JSON.stringify(back.rgb)}`);
  }
  return [...new Set(found)];
}
function wide(doc, width) {
  const scrolls = (e) => e && (["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const right = (e) => { const r = doc.createRange(); r.selectNodeContents(e); return r.getBoundingClientRect().right; };
  return [...doc.body.querySelectorAll("*")].filter((e) => !e.children.length && right(e) > width + 1 && !scrolls(e.parentElement))
    .map((e) => `${e.tagName}.${e.className} in ${e.parentElement.tagName}: ${e.textContent.trim().slice(0, 60)}`).slice(0, 5);
}
window.onload = () => { const all = [...document.querySelectorAll("iframe")].map((f) => { const doc = f.contentDocument;
    return {width: f.width, scroll: doc.documentElement.scrollWidth, wide: wide(doc, +f.width), faint: faint(doc),
            dark: light(of(getComputedStyle(doc.body).backgroundColor).rgb) < .2,
            texts: doc.body.innerText.length}; });
  document.body.innerHTML = ""; const out = document.createElement("pre"); out.textContent = JSON.stringify(all);
  document.body.append(out); };
"""


def looked_at(page: Path, scheme: str) -> list[dict]:
    """What a browser makes of the page at the width of a phone and of a desk."""
    inside = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frames = "".join(f'<iframe width="{w}" height="900" srcdoc="{inside}"></iframe>' for w in (360, 1280))
    outer = page.parent / "looked_at.html"
    outer.write_text(
        f'<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="{scheme}">'
        f"<style>:root {{ color-scheme: {scheme} }} iframe {{ border: 0 }}</style><body>{frames}<script>{MEASURE}</script>",
        encoding="utf-8",
    )
    wanted = {"light": "1", "dark": "0"}[scheme]  # Blink's PreferredColorScheme
    done = subprocess.run(
        [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--blink-settings=preferredColorScheme={wanted}",
         f"--user-data-dir={page.parent / 'browser'}", "--dump-dom", outer.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout[:500] + done.stderr[-500:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_a_phone_and_can_be_read_in_light_and_dark(folder: Path, scheme: str):  # noqa: F811
    put(folder / "monitors.json", {"monitors": [{"id": "ends", "rows": "L3", "title": "answers end", "verdict": "advice", "stage": "toy",
        "measured": "5% end; " + "snapshots" * 12, "needed": "90%", "remedy": "a\nb `trainworthy lr`", "seconds": 0.0, "evidence": {}, "reason": "",
        "remembered": ""}]})  # fmt: skip
    report.write(folder)
    assert_readable(folder / "report.html", scheme)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_sweep_fits_a_phone_too(scheme: str, tmp_path: Path):
    space = Space((("optim.name", ("adamw", "sgd")),), (Range("optim.lr", 1e-4, 1e-2, log=True),))
    rows = [findings.Row(n, space.point(n), "done", 0.9 + 0.01 * n, [0.9 + 0.01 * n, 0.89 + 0.01 * n], diagnosis="Stop: the curve is flat; "
            "the training loss rises: 0.21 at its lowest, 0.34 at the end", seconds=12.3) for n in range(10)]  # fmt: skip
    rows.append(findings.Row(10, space.point(10), "infeasible", reason="gate failed: " + "initial-loss" * 9))
    found = findings.Findings(
        "accuracy", True, space, rows, best=rows[9], each=[(c, rows[8 + n], 5) for n, c in enumerate(space.compared)]
    )
    found.edges = [findings.Edge("optim.lr", 9e-3, True, space.nuisance[0].wider(up=True), "optim.name adamw")]
    found.wider_command = (
        "trainworthy sweep vision/classify --nuisance optim.lr=0.0001:0.1 --trials 24 " + "--optim.betas 0.9 0.95 " * 4
    )
    assert_readable(
        sweep_page.write(
            tmp_path, "vision/classify", found, ["11 of 24 trials have ended, 1 infeasible."], "trainworthy run"
        ),
        scheme,
    )


def assert_readable(page: Path, scheme: str) -> None:
    """As wide as its window, with enough contrast, in the colours that were asked for."""
    for seen in looked_at(page, scheme):
        assert seen["texts"] > 1000
        assert seen["dark"] is (scheme == "dark")
        assert seen["scroll"] <= int(seen["width"]), seen["wide"]
        assert not seen["faint"], seen["faint"]
