"""usage: trainworthy data RECIPE [settings] [--sample N] [--json]

Describes a recipe's data before training: samples and distinct samples, classes, types, ranges, lengths, overlap of the splits.

  trainworthy data vision/classify                  every sample, through the evaluation path
  trainworthy data ./mine.py --sample 1000 --json   1,000 evenly spaced samples of each split, as JSON

Results are stored in runs/<recipe>/checks/<time>/: data.json, report.html and, for text data, lists of what validation and
training share:

  exclude_texts.json           identical texts
  exclude_chunks_min4.json     runs of four or more words that occur in at most three training texts

A recipe applies them with `skip = core.load_exclusions(FOLDER)`: leave out the training texts for which `skip(text)` is true.

This command only describes the data; `trainworthy check RECIPE --only data,leakage` decides whether they pass."""

import json
import shlex
import shutil
from typing import Any

from trainworthy.core.base import planning
from trainworthy.core.base.console import Console, bar, table
from trainworthy.core.base.errors import Stop, UserError
from trainworthy.core.commands import open_recipe, prints_json, take_number
from trainworthy.core.data import inventory
from trainworthy.core.data.texts import LISTS, Exclusions, write_exclusions
from trainworthy.core.recipe.stage import Data
from trainworthy.core.session import stages
from trainworthy.core.session.session import open_session, reported, session_lock, write_start


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    rest, samples = take_number(argv[1:], "--sample")
    planning.is_describing_data = True
    loaded, cfg, preset = open_recipe("data", rest)
    s = open_session(loaded, cfg, preset, rest, kind="checks")
    s.command = "data"
    with session_lock(s), reported(s):
        write_start(s)
        stage = stages.specs(loaded, cfg)[0].untrained(s.accelerator)
        if not s.main:  # only rank 0 reads
            return
        scans = {name: read(name, data, samples, s.console) for name, data in stage.data.items()}
        found = inventory.report(scans)
        for name, scan in scans.items():
            found["splits"][name]["repeats"] = inventory.repeats(scan)
        lists = None
        if "train" in scans and scans["train"].texts:
            shared = [one for scan in scans.values() if scan is not scans["train"]
                      for one in inventory.shared_texts(scans["train"], scan).values()]  # fmt: skip
            lists = write_exclusions(s.folder, shared)
            found["exclusions"] = excluded(lists, scans["train"])
        (s.folder / "data.json").write_text(json.dumps(found, indent=1))
        show(found, s.console, lists)
    output |= found
    kept = [f"{s.folder}/{name}" for name in ("data.json", "report.html", *(LISTS.values() if lists else ()))]
    only = ("--only", "data,leakage") if "train" in scans else ()  # gates that skip without a training set
    again = shlex.join(["trainworthy", "check", *rest, *only])
    s.console.say("\nkept   " + "\n       ".join(kept) + f"\nnext   {again}")


def read(name: str, data: Data, samples: int | None, console: Console) -> inventory.Scan:
    """Read one split, with a progress bar. An error names the sample that cannot be read."""
    done = 0

    def tick(n: int) -> None:
        nonlocal done
        done = n
        console.tick(n, lambda: "")

    count = min(len(data), samples or len(data))
    console.start_bar(f"reading {name}", count, 0)
    try:
        return inventory.scan(name, data, samples=count, hash_all=False if samples else None, tick=tick)
    except (Stop, KeyboardInterrupt):
        raise
    except Exception as error:
        where = data.representative(count)[done]
        raise UserError(f"sample {where} of {name} cannot be read", got=f"{type(error).__name__}: {error}",
                        needed="get(index, None) to return every field") from error  # fmt: skip
    finally:
        console.end_bar()


def excluded(lists: Exclusions, train: inventory.Scan) -> dict[str, int]:
    """Return the lengths of the lists, and how many training samples they would exclude."""
    rows = zip(*train.texts.values(), strict=True)
    return {"texts": len(lists.texts), "chunks": sum(map(len, lists.chunks.values())),
            "training_samples": sum(any(map(lists, row)) for row in rows)}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- output
def show(found: dict[str, Any], console: Console, lists: Exclusions | None) -> None:
    """Print the tables at the terminal's width."""
    splits = found["splits"]
    rows = [("", *splits)]
    for label, value in (
        ("samples", lambda s: f"{s['samples']:,}"),
        ("read", lambda s: f"{s['read']:,}"),
        ("unique inputs", lambda s: f"{s['unique_contents']:,}"),
        ("near copies inside", lambda s: number(s["repeats"]["near"])),
        ("constant entries", lambda s: percent(s["constant_input_share"])),
        ("same input, other class", lambda s: number(s["contradictory"] and s["contradictory"]["samples"])),
    ):
        rows.append((label, *(value(s) for s in splits.values())))
    console.say(table(rows))
    if notes := inventory.merge_notes({name: s["notes"] for name, s in splits.items()}):
        console.say("\n" + "\n".join(f"  {note}" for note in notes))
    for key in next(iter(splits.values()))["fields"]:
        show_field(key, {name: s["fields"][key] for name, s in splits.items()}, console)
    if "overlap" in found:
        show_overlap("val", "train", found["overlap"], console)
    for (a, b), o in ((tuple(k.split(" in ")), o) for k, o in found.get("overlaps", {}).items()):
        show_overlap(a, b, o, console)
    best = found.get("best_single_input")
    if best:
        console.say(f"\nbest single input entry: {best['entry']} gives the target of {best['accuracy']:.0%} of val "
                    f"(majority class {best['majority']:.0%})")  # fmt: skip
    if lists is not None:
        e = found["exclusions"]
        console.say(f"\nexclusion lists: {e['texts']:,} texts and {e['chunks']:,} chunks; honoured, they take "
                    f"{e['training_samples']:,} of {splits['train']['read']:,} training samples out")  # fmt: skip


def show_field(key: str, found: dict[str, dict[str, Any]], console: Console) -> None:
    first = next(iter(found.values()))
    if by := first.get("grouped_by"):
        counts = ", ".join(f"{f['unique']:,} in {name}" for name, f in found.items())
        console.say(f"\ngroups of samples with the same {by}: {counts}")
        return
    counts = {name: f["classes"] for name, f in found.items() if "classes" in f}  # free text: where answers repeat
    classes = f" · {len(next(iter(counts.values())))} classes" if counts else ""
    console.say(f"\n{key} · {first['role']}{classes}")
    rows = [("", *found)]
    for label, value in (
        ("type", lambda f: f["dtype"]),
        ("shape", shape),
        ("range", lambda f: f"{f['min']:g} to {f['max']:g}" if "min" in f else None),
        ("mean", lambda f: " ".join(f"{v:.3g}" for v in f["mean"]) if "mean" in f and "classes" not in f else None),
        ("std", lambda f: " ".join(f"{v:.3g}" for v in f["std"]) if "std" in f and "classes" not in f else None),
        ("not finite", lambda f: f"{f['non_finite_samples']:,}" if f["non_finite_samples"] else None),
        ("distinct values", lambda f: f"{f['unique']:,}"),
        ("fabricated: min · mean · max", lambda f: made_up(f.get("fabricated"))),
        ("valid labels", lambda f: percent(f["valid_share"]) if "valid_share" in f else None),
        ("no class", lambda f: " ".join(f"{k} ({n:,})" for k, n in list(f["invalid"].items())[:5]) if f.get("invalid") else None),
        ("per class: min · median · max", lambda f: spread(f.get("per_class"))),
        *((f"{name}: min · 5% · median · 95% · max", lambda f, n=name: spread(f.get("lengths", {}).get(n)))
          for name in dict.fromkeys(n for f in found.values() for n in f.get("lengths", {}))),
    ):  # fmt: skip
        cells = [value(f) for f in found.values()]
        if any(cells):
            rows.append((label, *(c or "-" for c in cells)))
    console.say(table(rows))
    if counts:
        show_classes(counts, console)


def show_classes(counts: dict[str, dict[str, int]], console: Console, most: int = 24) -> None:
    """Print samples per class as bars, with a column for each split. With many classes: the largest and the
    smallest."""
    first = next(iter(counts.values()))
    names = list(first)
    if len(names) > most:
        names = sorted(names, key=lambda n: -first[n])
        names = [*names[: most // 2], None, *names[-most // 2 :]]
    label = min(20, max(len(n) for n in names if n))
    digits = max(len(f"{n:,}") for c in counts.values() for n in c.values())
    room = shutil.get_terminal_size().columns - 2 - label - len(counts) * (digits + 4)
    room = max(4, min(30, room // len(counts)))
    head = "  ".join(f"{'':>{digits}} {split:<{room}}" for split in counts)
    console.say(f"\n  {'class':<{label}}  {head}".rstrip())
    for name in names:
        if name is None:
            console.say(f"  ... {len(first) - most:,} classes between them: data.json has all")
            continue
        each = [(c.get(name, 0), max(1, *c.values())) for c in counts.values()]
        cells = [f"{n:>{digits},} {bar(n / most_of, room):<{room}}" for n, most_of in each]
        console.say(f"  {name[:label]:<{label}}  {'  '.join(cells)}".rstrip())


def show_overlap(a: str, b: str, found: dict[str, Any], console: Console) -> None:
    """Print which samples of split `a` are also in split `b`."""
    exact, of = found["compared"]["exact"], found["compared"]["of"]
    rows = [("same input", f"{found['exact']:,} of {exact[0]:,}")]
    if exact != of:
        rows.append(("", f"compared with {exact[1]:,} of {of[1]:,} samples of {b}"))
    if found["near"] is None:
        rows.append(("near copies", "inputs cannot be compared by their values"))
    else:
        closest = f"closest {found['largest_similarity']}, a copy from {found['limit']} on"
        rows.append(("near copies", f"{found['near']:,} ({closest})"))
        if found.get("smooth"):
            rows.append(("alike, no copies", f"{found['smooth']:,}: only their smooth parts agree"))
    for key, shared in found["groups"].items():
        count = "20 or more" if len(shared) == 20 else len(shared) or "none"  # the inventory lists at most twenty
        rows.append((f"groups of {key}", f"{count} on both sides {' '.join(shared[:5])}".rstrip()))
    for key, t in found.get("texts", {}).items():
        usual = f" ({t['usual']:,} more have a short or frequent one, which identifies no sample)" if t["usual"] else ""
        rows.append((f"{key}: same text", f"{t['exact']:,} samples{usual}"))
        closest = f"closest {t['closest']:.0%} of its rare chunks"
        rows.append((f"{key}: near duplicates", f"{t['near']:,} samples ({closest})"))
        chunks = f"{t['chunks']:,} of 4+ words ({t['common_chunks']:,} common phrases not counted)"
        rows.append((f"{key}: shared chunks", chunks))
        rows += [("", f'"{c if len(c) < 60 else c[:57] + "..."}"') for c in t["longest_chunks"][:3]]
    console.say(f"\n{a} in {b}")
    width = max(len(r[0]) for r in rows)
    for label, text in rows:
        console.say(f"  {label:<{width}}  {text}")


def shape(found: dict[str, Any]) -> str | None:
    """Return the smallest and largest shape if the field is a tensor with axes."""
    if "str" in found["dtype"] or not found.get("shape", {}).get("max"):
        return None
    low, high = ("x".join(map(str, found["shape"][k])) for k in ("min", "max"))
    return low if low == high else f"{low} to {high}"


def spread(lengths: dict[str, int] | None) -> str | None:
    return " · ".join(f"{v:,}" for v in lengths.values()) if lengths else None


def made_up(share: dict[str, Any] | None) -> str | None:
    return " · ".join(f"{share[k]:.1%}" for k in ("min", "mean", "max")) if share else None


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
