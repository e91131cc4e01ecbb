"""The sections of the page, each made from the run folder alone."""

import math
import re
import shlex
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base.errors import STOPPED_ITSELF, UserError
from trainworthy.core.base.verdict import is_explained
from trainworthy.core.monitoring.metrics import read_rows
from trainworthy.core.recipe.forks import NOTE, origin, without_note
from trainworthy.core.recipe.registry import find
from trainworthy.core.recipe.source_pieces import pieces
from trainworthy.core.report.advice import Advice, advise, against_healthy
from trainworthy.core.report.bands import outside
from trainworthy.core.report.card import CHOSEN, measured
from trainworthy.core.report.evidence import verdict_table
from trainworthy.core.report.folder import ENDED, Folder, forked_from, read_json, references
from trainworthy.core.report.folder import number as as_number
from trainworthy.core.report.html import bars, card, code, details, esc, note, num, picture, pill, table, tag, words

STOPPED = "Stopped itself"
COLUMNS = 12  # evaluations shown next to each other
SHOWN = 40  # rows and columns of a class table: 1,000 of each would make a page of 52 MB


def name_of(f: Folder) -> str:
    """The recipe's id; for a fork, its file name without folders, which are private."""
    target = f.summary.get("recipe") or f.args.get("recipe") or f.path.parent.name
    return Path(target).stem if target.endswith(".py") else target


def verdict(f: Folder) -> tuple[str, str]:
    """(good, warn or bad; the gates' result in words)."""
    gates = f.gates.get("gates", [])
    if f.args.get("foreign"):
        return "warn", "Another tool's run: no gate was run on it"
    if f.only_described:
        return "warn", "The data, described: no gate was run"
    if not f.gates:
        return "warn", "No verdicts: the gates did not finish"
    if not f.gates.get("enabled", True):
        return "bad", "Gates were OFF: nothing was checked"
    if f.failed:
        more = f" and {len(f.failed) - 2} more" if len(f.failed) > 2 else ""
        failed = (", " if more else " and ").join(f.failed[:2]) + more
        return "bad", f"{'Check' if f.only_checked else 'Stopped before training'}: {failed} failed"
    n = {k: sum(v["verdict"] == k for v in gates) for k in ("pass", "skip", "waived")}
    extra = "".join(f", {n[k]} {word}" for k, word in (("skip", "skipped"), ("waived", "waived")) if n[k])
    words = f"{n['pass']} of {len(gates)} gates passed{extra}"
    kind = "warn" if n["waived"] or f.summary.get("warning") or outside(f) else "good"
    if (edited := touched(f)) is not None:
        readers = [v for v in gates if edited & {*v.get("reads", ())}]
        passed = sum(v["verdict"] == "pass" for v in readers)
        what = ", ".join(sorted(edited)) if len(edited) < 5 else f"{len(edited)} parts" if edited else "nothing"
        words = f"{passed} of {len(readers)} gates that read what this fork changed ({what}) passed; {words}"
    return kind, words


def touched(f: Folder) -> set[str] | None:
    """Parts of the recipe that a fork changed; None if this is no fork, or its parent is unavailable."""
    path = f.path / "recipe.py"
    source = path.read_text(encoding="utf-8") if path.is_file() else ""
    if not forked_from(source):
        return None
    try:
        found = NOTE.search(source)
        old = pieces(without_note(origin(find(found["recipe"]), found, "")[0]))
        new = pieces(without_note(source))
    except (UserError, OSError, SyntaxError):
        return None
    moved = [k for k in {**old, **new} if k not in old or k not in new or old[k].meaning != new[k].meaning]
    return {part for k in moved for part in (new.get(k) or old[k]).parts}


def state(f: Folder) -> str:
    """Describe in a sentence how far this run came."""
    step = max([r["step"] for r in (*f.steps[-1:], *f.rows[-1:])], default=0)
    if f.args.get("foreign"):
        return f"Read from {f.args['foreign']}: {len(f.rows)} evaluation{'s' * (len(f.rows) > 1)}, up to step {step:,}."
    if f.only_described:
        return "Nothing was checked or trained, as requested."
    if f.only_checked:
        return "Gates only: nothing was trained, as requested."
    if f.summary and not f.summary.get("unfinished"):
        s = f.summary
        return f"Finished: {s['steps']:,} steps, {s['epochs']:g} epochs, {s['train_seconds']:.0f} s of training."
    if f.failed:
        return "No training step was made, so there is no result yet."
    if not step:
        return "Not trained yet: no step was logged."
    total = f" of {n:,}" if (n := total_steps(f)) else ""
    if (end := read_json(f.path / ENDED)).get("exit_code") == STOPPED_ITSELF:
        return f"{STOPPED} at step {step:,}{total}: {' '.join(end['message'].split())}"
    return f"Not finished: step {step:,}{total}. It was interrupted, stopped itself, or is still running; it can be resumed."


def hero(f: Folder) -> str:
    """Verdict, result, and the result next to its baselines."""
    (kind, words), recipe, question = verdict(f), name_of(f), f.summary.get("question") or ""
    seed, stamp = f.settings.get("run", {}).get("seed", "?"), " ".join(f.path.absolute().name.split("-")[:2])
    facts = [recipe, f.args.get("preset", ""), f"seed {seed}", stamp] if not f.args.get("foreign") else []
    left = tag("p", " · ".join(esc(x) for x in facts if x), class_="eyebrow")
    left += tag("h1", esc(question[:1].upper() + question[1:] or recipe)) + pill(kind, words)
    now = state(f)
    if now.startswith("Not finished"):
        left += pill("warn", "Not finished")
    if now.startswith(STOPPED):
        left += pill("bad", STOPPED)
    if broken := [v["id"] for v in f.monitors if v["verdict"] == "fail"]:
        left += pill("bad", f"{' and '.join(broken)} failed while training")
    for words in filter(None, (outside(f), f.summary.get("warning"))):
        left += pill("bad", words[:1].upper() + words[1:])
    number, right = result(f) if "metric" in f.summary and (f.rows or "reported" in f.summary) else ("", "")
    left += number + tag("p", esc(now), class_="state")
    return tag("header", tag("div", left) + right, class_="hero" if right else "hero alone")


def result(f: Folder) -> tuple[str, str]:
    """The number with its uncertainty, and bars next to its baselines."""
    s, name, newest = f.summary, f.summary["metric"], (f.rows or [{}])[-1]
    reported = s.get("reported")
    if not reported:
        reported = {"weights": "newest", "step": newest["step"], name: as_number(newest.get("val/" + name))}
    higher = s.get("higher_is_better", True)
    of = f"{reported['weights']} weights, step {reported['step']:,} ({CHOSEN.get(reported['weights'], 'unfinished')})"
    fine = [
        f"last evaluation, step {reported['step']:,}" if s.get("foreign") else of,
        *([f"{f.n_val:,} held-out samples"] if f.n_val else []),
        "one seed: differences between single seeds are not results",
        *(["gates off: nothing was checked"] if not f.gates.get("enabled", True) else []),
        *([f"metric {name}: {'higher' if higher else 'lower'} is better"] if s.get("foreign") else []),
    ]
    number = tag("p", f"<strong>{esc(num(reported[name]))}</strong> <span>{esc(name)}</span>", class_="number")
    if limits := s.get("intervals", {}).get("val", {}).get(name):
        fine.append(f"95% interval over these samples {num(limits[0])} to {num(limits[1])}")
    if test := s.get("test"):
        value, n = num(test["metrics"][name]), test["samples"]
        fine.append(f"{name} {value} on the {n:,} samples of the test split, evaluated once, at the end")
    elif "test" in s:
        fine.append("there is no test split: settings may have been chosen on the same held-out samples")
    number += note("; ".join(fine) + ".")
    ranked = sorted(references(s), key=lambda r: r[1], reverse=higher)
    if not ranked:
        return number, ""
    rows = [("this model", reported[name], "model"), *((k, v, "other") for k, v in ranked)]
    best = f" Best known: {s['best_known']}." if s.get("best_known") else ""
    drawn = bars(rows, high=s.get("ceiling"), caption=f"{name}, against baselines")
    drawn += note(f"{'Higher' if higher else 'Lower'} is better.{best}")
    head, model, *others = measured(s) if "metrics" in s else [()] * 2
    if len(head) > 2:
        cells = [[esc(row[0]), *map(esc, row[2:])] for row in (("this model", *model[1:]), *others) if any(row[2:])]
        drawn += table(["", *map(esc, head[2:])], cells)
    return number, tag("div", drawn, class_="card")


def next_steps(f: Folder) -> str:
    """The recommendation; after a failed gate, how to find its cause."""
    if f.failed:
        again = ["check", *f.arguments, "--only", ",".join(f.failed)]
        again = ["resume", str(f.path)] if {"fallbacks", "rungs"} & f.args.keys() else again
        tail = code(shlex.join(["trainworthy", *again]))
        broken = [v for v in f.verdicts if v["verdict"] == "fail"]
        first = next((v for v in broken if is_explained(v.get("cause", ""), v.get("evidence") or {})), broken[0])
        cause = f"Likely cause ({first['id']}): {first['remedy'].splitlines()[0]}. " if first["remedy"] else ""
        where = cause + "Other causes and the evidence are below, under Gates. To try again:"
        todo = [Advice("Fix what failed, then run the gates again", where)]
    elif f.rows:
        todo, tail = advise(f.rows, f.summary, f.settings, f.n_val, own_samples=f.own_samples), ""
        if skipped := f.summary.get("skipped_steps"):
            why = "Their loss or gradient was not finite; weights were not touched. The batches are in postmortem/."
            todo.append(Advice(f"Look at {len(skipped)} skipped steps", why))
        for v in f.monitors:
            if v["verdict"] not in ("fail", "advice"):
                continue
            fallback = bool(v.get("evidence", {}).get("fallback"))
            first, *more = v["remedy"].splitlines() or [""]
            first = f"`{first}`" if first.startswith("trainworthy ") else first[:1].upper() + first[1:]
            one = Advice(f"Monitor {v['id']}: {v['title']}", f"{v['measured']}. {'; '.join([first, *more])}", fallback)
            todo.insert(0 if fallback else len(todo), one)
        if behind := outside(f):
            for one in todo:
                if one.title == "It beats every baseline":
                    one.title += ", but not its recipe's healthy runs"
                    one.evidence += f" {behind}"
        if departed := against_healthy(f):
            todo.insert(0 if departed.urgent else len(todo), departed)
    else:
        return ""
    cards = "".join(tag("li", tag("h3", esc(a.title)) + tag("p", words(a.evidence)), class_="card") for a in todo)
    return tag("ol", cards, class_="advice") + tail


def earlier(f: Folder) -> str:
    """Earlier stages: how far each came, and its number."""
    cards = []
    for stage in f.stages:
        number = result(stage)[0] if "metric" in stage.summary and (stage.rows or "reported" in stage.summary) else ""
        link = tag("a", esc(stage.path.name), href=f"stages/{stage.path.name}/report.html")
        cards.append(tag("li", tag("h3", link) + number + tag("p", esc(state(stage)), class_="state"), class_="card"))
    return tag("ol", "".join(cards), class_="advice") if cards else ""


def gate_section(f: Folder) -> str:
    if f.verdicts:
        return verdict_table(f, f.verdicts)
    return tag("p", "This run was started with --gates.no-enabled.", class_="card") if f.gates else ""


def tiles(f: Folder, split: str) -> list[tuple[bytes | None, str]]:
    """(PNG, caption) of each tile saved for `split`."""
    folder = f.path / "previews" / split
    captions = read_json(folder / "captions.json", list) or [""] * len(list(folder.glob("*.png")))
    paths = [folder / f"{i:02d}.png" for i in range(len(captions))]
    return [(p.read_bytes() if p.is_file() else None, str(c)) for p, c in zip(paths, captions, strict=True)]


def gallery(items: list[tuple[Any, str]], what: str) -> str:
    images = ["" if p is None else picture(p, f"{what}: {c}") for p, c in items]
    cells = [tag("figure", image + tag("figcaption", esc(c))) for image, (_, c) in zip(images, items, strict=True)]
    roomy = any(len(c) > 12 or (isinstance(p, bytes) and len(p) > 6000) for p, c in items)
    return tag("div", "".join(cells), class_="gallery roomy" if roomy else "gallery")


def inputs(f: Folder) -> str:
    """Training and validation path, decoded from the tensors."""
    names = (("train", "Training path, with its augmentation"), ("val", "Validation path"))
    return "".join(tag("h3", title) + gallery(tiles(f, k), title) for k, title in names if tiles(f, k))


def predictions(f: Folder) -> str:
    """One row per sample, one column per evaluation: the prediction and its score."""
    rows = read_rows(f.path / "previews" / "predictions.jsonl")
    if not rows:
        return ""
    keep = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), COLUMNS)).round().astype(int))
    columns, truth, body = [rows[i] for i in keep], tiles(f, "val"), []
    for i in range(len(columns[0]["captions"])):
        image, label = truth[i] if i < len(truth) else (None, f"sample {i + 1}")
        cells = [tag("span", ("" if image is None else picture(image, f"sample {i + 1}")) + esc(label), class_="truth")]
        for r in columns:
            good, caption = r["good"][i], r["captions"][i]
            share = "" if good is None else tag("small", f"{good:.0%}")
            mark = tag("b", "✓", title="the same as the truth") if truth and caption == label else ""
            kind = "" if good is None else "right" if good >= 0.5 else "wrong"
            style = None if good is None else f"--v:{abs(good - 0.5) * 90:.0f}%"
            cells.append(tag("span", f"{tag('span', esc(caption) + mark)}{share}", class_=f"cell {kind}", style=style))
        body.append(cells)
    return table(("truth" if truth else "", *(f"step {r['step']:,}" for r in columns)), body, class_="predictions")


def weights(f: Folder) -> str:
    """Every set of weights of this run: which was exported and why, where it started, where it ended."""
    if not f.finished or f.summary.get("foreign"):  # which weights another tool kept is not known
        return ""
    s, name = f.summary, f.summary["metric"]
    chosen, final = s["reported"]["weights"], s["final"]
    rows = [("final", final["step"], final.get(f"val/{name}"), chosen == "final")]
    for i, b in enumerate(s.get("n_best", [])):
        n = s.get("evaluations", 0)
        of = f" of {n} evaluation{'s' * (n > 1)}" if n else ""
        rows.append((f"{'best' if i == 0 else f'{i + 1}. best'}{of}", b["step"], b[name], i == 0 and chosen == "best"))
    mark = tag("span", "exported", class_="pill accent")
    body = [[esc(k), esc(num(step)), esc(num(v)) + mark * on] for k, step, v, on in rows]
    text = f"Exported: the {chosen} weights, {CHOSEN[chosen]} (--run.export)."
    if start := f.args.get("start"):
        fresh = len(start["missing"]) + len(start["mismatched"])
        text += f" Fine-tuned from {start['file']}: {start['share']:.1%} of the parameters loaded, {fresh} tensors left fresh."
    if s["steps"] < (planned := total_steps(f)):
        text += f" Stopped early: after {s['steps']:,} of {planned:,} planned steps."
    return card("Which weights", table(("weights", "step", esc(name)), body, class_="plain") + note(text))


def total_steps(f: Folder) -> int:
    """Planned steps; 0 if unknown."""
    train, splits = f.settings.get("train", {}), f.data.get("splits", {})
    made = train.get("batch_size", 0) if splits else 0  # no training set: own samples
    n = splits.get("train", {}).get("samples", made)
    planned = max(1, math.ceil(train["epochs"] * n / train["batch_size"])) if n and train.get("batch_size") else 0
    return min(planned, train.get("max_steps") or planned)


def figures(f: Folder) -> str:
    """Figures of the recipe, with the weights that they show, and its per-class metrics."""
    parts = [weights(f)]
    for title, figure in f.summary.get("figures", {}).items():
        if "x" in figure:
            continue  # a chart
        if isinstance(figure, list):
            images = [None if t.get("image") is None else np.array(t["image"], float) for t in figure]
            items = list(zip(images, [t.get("caption", "") for t in figure], strict=True))
            parts.append(card(title, gallery(items, title)))
        else:
            parts.append(card(title, matrix(figure)))
    newest = {k[4:]: v for k, v in (f.rows or [{}])[-1].items() if k.startswith("val/")}
    metrics = f.summary.get("metrics") or newest
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for key, value in metrics.items():
        group, _, name = key.partition("/")
        groups.setdefault(group if name else "", []).append((name or group, as_number(value), "other"))
    scalars = [[esc(k), esc(num(v))] for k, v, _ in groups.pop("", [])]
    if scalars:
        parts.append(card("All metrics", table((), scalars, class_="plain")))
    for group, rows in groups.items():
        worst = min(rows, key=lambda r: r[1])
        rows = [(k, v, "worst" if v == worst[1] and len(rows) > 1 else kind) for k, v, kind in rows]
        kept = rows if len(rows) <= 40 else sorted(rows, key=lambda r: r[1])[:30]
        words = f"Lowest: {worst[0]}, {num(worst[1])}." + ("" if kept is rows else f" The 30 lowest of {len(rows)}.")
        parts.append(card(f"{group}, one by one", bars(kept) + note(words)))
    return tag("div", "".join(parts), class_="figures") if any(parts) else ""


def matrix(figure: dict[str, Any]) -> str:
    """A heat table: shaded by the fraction of its row, the diagonal framed, zeros faint."""
    values, (down, across) = np.array(figure["values"], float), figure.get("axes") or ("", "")
    rows, columns, more = figure["rows"], figure["columns"], ""
    if len(rows) > SHOWN or len(columns) > SHOWN:
        if values.shape[0] == values.shape[1]:  # the classes with the most confusions, in their order
            off = np.abs(values) * (1 - np.eye(len(values)))
            down_to = across_to = np.sort(np.argsort(-(off.sum(0) + off.sum(1)), kind="stable")[:SHOWN])
            which = f"The {SHOWN} of {len(rows):,} with the most off the diagonal"
        else:
            down_to, across_to = np.arange(min(SHOWN, len(rows))), np.arange(min(SHOWN, len(columns)))
            which = f"The first {len(down_to)} of {len(rows):,} rows and {len(across_to)} of {len(columns):,} columns"
        values = values[np.ix_(down_to, across_to)]
        rows, columns = [rows[i] for i in down_to], [columns[i] for i in across_to]
        more = note(f"{which}; all of it is in summary.json.")
    total = np.abs(values).sum(1, keepdims=True)
    share = np.divide(np.abs(values), total, out=np.zeros_like(values), where=total > 0)
    square, body = values.shape[0] == values.shape[1], []
    for i, label in enumerate(rows):
        cells = []
        for j, v in enumerate(values[i]):
            marks = (("diagonal", square and i == j), ("zero", v == 0), ("hot", share[i, j] > 0.5))
            kind = " ".join(["heat", *(k for k, on in marks if on)])
            text = esc(f"{v:g}" if v.is_integer() else num(float(v)))
            cells.append(tag("span", text, class_=kind, style=f"--v:{share[i, j] * 100:.0f}%"))
        body.append([esc(label), *cells])
    head = (tag("span", f"{esc(down)} ↓<br>{esc(across)} →", class_="dim"), *(esc(c) for c in columns))
    return table(head, body, class_="matrix") + more


def markdown(text: str) -> str:
    """Convert the Markdown that a card uses: headings, bold, tables, lists, paragraphs."""
    out = []
    for block in re.split(r"\n\s*\n", esc(unescape(text))):  # a card is escaped for Markdown
        lines = [re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", x) for x in block.strip().splitlines()]
        if lines and lines[0].startswith("#"):
            out.append(tag("h4", lines.pop(0).lstrip("# ")))
        if lines and lines[0].startswith("|"):
            rows = [re.split(r"(?<!\\)\|", x.strip("|")) for x in lines if not set(x) <= set("|-: ")]
            head, *body = [[c.strip().replace("\\|", "|") for c in row] for row in rows]
            out.append(table(head, body, class_="plain"))
        elif lines and lines[0].startswith("- "):
            out.append(tag("ul", "".join(tag("li", x.removeprefix("- ")) for x in lines)))
        elif lines:
            out.append(tag("p", " ".join(lines)))
    return "".join(out)


FILES = {
    "report.html": "this page", "card.md": "the run card", "args.json": "settings", "environment.json": "versions, commit, diff",
    "data.json": "data report", "gates.json": "verdicts and evidence", "gates": "batch and script of each failure",
    "summary.json": "results", "step_metrics.jsonl": "every step", "epoch_metrics.jsonl": "every evaluation",
    "tb": "TensorBoard", "plots": "the curves as PNG", "previews": "inputs and predictions", "checkpoints": "to resume from",
    "export": "the model, to load elsewhere", "postmortem": "batches of skipped steps", "recipe.py": "the recipe as it ran",
}  # fmt: skip


def files_section(f: Folder) -> str:
    rows = [[tag("code", k), v] for k, v in FILES.items() if k == "report.html" or (f.path / k).exists()]
    given = f.arguments
    commands = [["run", *given], ["check", *given], ["report", str(f.path)]] if given else []
    if any(f.path.glob("checkpoints/*/step-*")) and (not f.summary or f.summary.get("unfinished")):
        commands.insert(0, ["resume", str(f.path)])
    path = f.path / "card.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    fold = details("The card", tag("div", markdown(text), class_="prose")) if text else ""
    lines = "\n".join(shlex.join(["trainworthy", *c]) for c in commands)
    return (code(lines) if lines else "") + table((), rows, class_="plain") + fold
