"""What the report page says of the data: splits, overlap, lengths, ranges of fields, classes."""

from typing import Any

from trainworthy.core.report.folder import Folder
from trainworthy.core.report.html import bars, card, esc, note, num, table, tag


def data_section(f: Folder) -> str:
    splits, o = f.data.get("splits", {}), f.data.get("overlap", {})
    if not splits:
        return ""
    size, near = [], any("repeats" in s for s in splits.values())
    for name, s in splits.items():
        counts = [s["samples"], s["read"], s["unique_contents"], s["read"] - s["unique_contents"]]
        counts += [s.get("repeats", {}).get("near")] if near else []
        size.append([esc(name), *(esc(num(n)) if n is not None else "not comparable" for n in counts)])
    head = ("split", "samples", "read", "unique", "repeated", *(["near copies"] if near else []))
    parts = [table(head, size, class_="plain")]
    parts += [note(f"{name}: {k}: {v}.") for name, s in splits.items() for k, v in s.get("notes", {}).items()]
    for of, found in {"val in train": o, **f.data.get("overlaps", {})}.items():
        parts += [note(shared(of, found))] if found else []
    head = ("field", "role", "type", "shape", "range", "mean", "std", "not finite")
    each = [
        (f"{split}: {k}", x) for split, s in splits.items() for k, x in s["fields"].items() if not x.get("grouped_by")
    ]
    parts.append(table(head, [field_row(*x) for x in each], class_="plain"))
    cards = [*histograms(splits), fabricated(each), lengths(each), texts(o.get("texts", {}))]
    return "".join(parts) + tag("div", "".join(cards), class_="figures")


def shared(of: str, o: dict[str, Any]) -> str:
    """Samples of one split that are also in another."""
    near = "near ones not comparable"
    if o.get("near") is not None:
        near = f"{o['near']:,} near (closest pair {num(o.get('largest_similarity'))})"
    groups = "".join(f"; {len(v)} shared values of {k}" for k, v in o.get("groups", {}).items())
    texts = "".join(f"; {k}: {t['exact']:,} exact and {t['near']:,} near texts, {t['chunks']:,} shared chunks"
                    for k, t in o.get("texts", {}).items())  # fmt: skip
    return f"Samples of {of}: {o.get('exact', 0):,} exact, {near}{groups}{texts}."


def fabricated(fields: list[tuple[str, dict[str, Any]]]) -> str:
    """Fabricated fraction of each field (padded, interpolated, synthetic), if the recipe declares it."""
    declared = [(k, x["fabricated"]) for k, x in fields if x.get("fabricated")]
    if not declared:
        return ""
    rows = [(f"{k}", float(x["mean"]), "worst" if x["mean"] > 0.5 else "other") for k, x in declared]
    words = "; ".join(f"{k}: {x['min']:.0%} to {x['max']:.0%} of a sample" for k, x in declared)
    return card("Fabricated share, mean over samples", bars(rows, high=1.0) + note(f"{words}."))


def lengths(fields: list[tuple[str, dict[str, Any]]]) -> str:
    rows = [[esc(f"{k}, {unit}"), *(esc(num(n)) for n in spread.values())]
            for k, x in fields for unit, spread in x.get("lengths", {}).items()]  # fmt: skip
    head = next((list(spread) for _, x in fields for spread in x.get("lengths", {}).values()), [])
    return card("Lengths", table(("field", *map(esc, head)), rows, class_="plain")) if rows else ""


def texts(found: dict[str, Any]) -> str:
    """Texts that validation shares with training: the longest runs of words."""
    rows = [[esc(key), esc(chunk)] for key, t in found.items() for chunk in t["longest_chunks"][:10]]
    return card("Longest shared chunks", table((), rows, class_="plain")) if rows else ""


def field_row(name: str, x: dict[str, Any]) -> list[str]:
    """One entry of a sample: its shape (smallest, median, largest if they differ), range and moments."""
    shapes = [str(tuple(x["shape"][k])) for k in ("min", "median", "max") if k in x.get("shape", {})]
    shape = " · ".join(shapes[:1] if len(set(shapes)) == 1 else shapes)
    limits = f"{x['min']:g} to {x['max']:g}" if "min" in x else ""
    moments = [", ".join(map(num, x.get(k, []))) for k in ("mean", "std")]
    return [esc(v) for v in (name, x["role"], x["dtype"], shape, limits, *moments, num(x["non_finite_samples"]))]


def histograms(splits: dict[str, Any]) -> list[str]:
    found = []
    for split, s in splits.items():
        for name, x in s["fields"].items():
            counts = x.get("classes")
            if not counts or len(counts) < 2:
                continue
            top = sorted(counts.items(), key=lambda kv: -kv[1])[:30] if len(counts) > 40 else counts.items()
            p = x["per_class"]
            words = f"{len(counts)} classes; smallest {p['min']:,}, median {p['median']:,}, largest {p['max']:,}"
            words += f"; {sum(x['invalid'].values()):,} invalid" if x.get("invalid") else ""
            words += "; the 30 largest." if len(counts) > 40 else "."
            found.append(card(f"{split}: {name}", bars([(k, n, "other") for k, n in top]) + note(words)))
    return found
