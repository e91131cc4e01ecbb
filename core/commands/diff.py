"""usage: trainworthy diff FORK.py [--against RECIPE] [--json]

Shows what a fork changed against its original recipe: settings (by value), code (by syntax, without comments, docstrings and
layout) grouped by the part of the stage, expectations declared to the gates, and which gates check the changed parts.

  trainworthy diff ./mine.py
  trainworthy diff ./mine.py --against llm/sft

`trainworthy fork` writes the original's name and version at the end of the file. If the recipe has changed since, the command
takes the old version from git if possible. --against compares with another recipe, or a file without that line. `--json` prints changed
settings and parts, and the gates that check them."""

import difflib
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from trainworthy.core.base import masking
from trainworthy.core.base.config import PRESETS, flat, to_dict
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import argument_parser, prints_json
from trainworthy.core.recipe import loading
from trainworthy.core.recipe.forks import NOTE, origin, without_note
from trainworthy.core.recipe.registry import HOME, Entry, find


@prints_json
def main(argv: list[str], output: dict[str, Any]) -> None:
    """Print what a fork changed; put it into `output`."""
    parser = argument_parser(__doc__)
    parser.add_argument("fork")
    parser.add_argument("--against")
    args = parser.parse_args(argv[1:])
    fork = find(args.fork)
    source = fork.path.read_text()
    found = NOTE.search(source)
    if not found and not args.against:
        ours = HOME in fork.path.parents
        raise UserError(f"{args.fork} is {'a recipe' if ours else 'not a fork'}: it does not name its original",
                        got="no note at its end", needed="a file that `trainworthy fork` made",
                        next=f"trainworthy diff {args.fork} --against RECIPE")  # fmt: skip
    called = args.against or found["recipe"]
    base = find(called)
    old, since = origin(base, None if args.against else found, f"trainworthy diff {args.fork} --against {called}")
    head = f"{args.fork}: " + (f"compared with {called}" if args.against else f"forked from {called} {found['when']}")
    if since:
        head += "\n" + textwrap.fill(since, 100, initial_indent="  ", subsequent_indent="  ")
    source, old = without_note(source), without_note(old)
    if source == old:
        print(f"{head}\nnothing changed")
        output |= {"fork": args.fork, "against": called, "changed": False}
        return
    loaded = loading.load(args.fork)  # raises for a file that is no recipe before anything is printed
    print(head)
    about = {"fork": args.fork, "against": called, "since": since or None}
    output |= about | compare(loaded, args.fork, source, base, old)


def compare(loaded: loading.Recipe, name: str, source: str, base: Entry, old: str) -> dict[str, Any]:
    """Print the differences, the gates concerned and the next command; return them."""
    from trainworthy.core import gates
    from trainworthy.core.gates import order
    from trainworthy.core.recipe.source_pieces import OF_GROUP, expectations, pieces

    after = presets(loaded.module)
    before = values(base, old)
    a, b = pieces(old), pieces(source)
    touched: dict[str, None] = {}
    homes: set[str] = set()

    rows = []
    for setting, was, now, where in changed_settings(before, after):
        group = setting.split(".")[0]
        readers = dict.fromkeys(p for x in {**a, **b}.values() if group in x.settings for p in x.parts)
        readers = OF_GROUP.get(group, tuple(readers))
        touched |= dict.fromkeys(readers)
        rows.append((setting, was, now, "; ".join(filter(None, (where, ", ".join(readers))))))
    section("settings", rows)

    then, today = expectations(a), expectations(b)
    changed = [k for k in {**then, **today} if then.get(k) != today.get(k)]
    rules = [(f"expect.{k}", then.get(k, "-"), today.get(k, "-"), "") for k in changed]
    rules += changed_settings(before, after, "gates.")
    section("told to the gates", rules)

    moved = [k for k in {**a, **b} if k not in a or k not in b or a[k].meaning != b[k].meaning]
    for part, keys in by_part(moved, a, b).items():
        print(f"\n{part}")
        for key in keys:
            print_diff(key, a.get(key), b.get(key), Path(name).name)
            piece = b.get(key) or a[key]
            touched |= dict.fromkeys(piece.parts)
            homes |= set(piece.home)
    if not (moved or rows or rules):
        print("only comments, docstrings or layout changed: nothing that runs")
        return {"changed": False}

    every = [*order.ORDER, *(g for g in vars(loaded.module).values() if isinstance(g, gates.Gate))]
    concerned = [g for g in every if touched.keys() & set(g.reads)]
    unseen = sorted(homes - {part for g in every for part in g.reads})
    own = [order.OWN] if touched and len(concerned) < len(every) else []
    _show_gates(concerned, own, len(every), touched, unseen)
    again = next_command(name, [*(g.id for g in concerned), *own], complete=len(concerned) == len(every))
    print(f"\nnext   {again}")
    settings, expected = (
        [dict(zip(("name", "before", "now", "where"), _masked(row), strict=True)) for row in found]
        for found in (rows, rules)
    )
    code = [{"name": key, "parts": list((b.get(key) or a[key]).home), "line": b[key].line if key in b else None,
             "diff": "\n".join(_diff(a.get(key), b.get(key)))} for key in moved]  # fmt: skip
    return {"changed": True, "settings": settings, "told_to_the_gates": expected, "code": code,
            "gates": {g.id: [p for p in touched if p in g.reads] for g in concerned}, "no_gate_looks_at": unseen, "next": again}  # fmt: skip


def _show_gates(concerned: list, own: list[str], of: int, touched: dict, unseen: list[str]) -> None:
    """Print which gates look at the changed parts, and at which. `own`: the name of the recipe's, which are not known here."""
    also = ", and those that core does not run for every recipe" if own else ""
    print(f"\ngates that look at this ({len(concerned)} of core's {of}{also})")
    width = max((len(x) for x in (*own, *(g.id for g in concerned))), default=0)
    for g in concerned:
        print(f"  {g.id:<{width}}  {', '.join(p for p in touched if p in g.reads)}")
    for name in own:
        print(
            f"  {name:<{width}}  the recipe's own gates (formula, export, ...), which are known once its stages are built"
        )
    if unseen:
        print(f"  no gate of core looks at: {', '.join(unseen)}")


def next_command(name: str, concerned: list[str], *, complete: bool) -> str:
    """Return the command that runs the gates which look at the change. `complete`: all of core's do."""
    only = "" if complete or not concerned else f" --only {','.join(concerned)}"
    return f"trainworthy {'check' if concerned else 'run'} {name}{only}"


def values(base: Entry, old: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the recipe's presets in the source `old`."""
    if old == without_note(base.path.read_text()):
        return presets(loading.load(str(base.path)).module)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / base.path.name
        path.write_text(old)
        return presets(loading.load(str(path)).module)


def presets(module: Any) -> dict[str, dict[str, Any]]:
    """Return {preset: {name of a setting: its default}}."""
    return {name: flat(to_dict(getattr(module, name)())) for name in PRESETS if name in vars(module)}


def changed_settings(before: dict, after: dict, group: str = "") -> list[tuple[str, str, str, str]]:
    """Return (name, old, new, preset) of changed settings; gate settings only if `group` asks for them."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for preset in {**before, **after}:
        a, b = before.get(preset, {}), after.get(preset, {})
        if bool(a) != bool(b):
            rows[f"preset {preset}", "-" if b else "there", "there" if b else "-"] = []
            continue
        for name in {**a, **b}:
            if name.startswith("gates.") == (group == "gates.") and a.get(name, "-") != b.get(name, "-"):
                rows.setdefault((name, *(str(x.get(name, "-")) or "-" for x in (a, b))), []).append(preset)
    return [(*key, "" if len(found) == len(after) else ", ".join(found)) for key, found in rows.items()]


def by_part(keys: list[str], a: dict, b: dict) -> dict[str, list[str]]:
    """Return {part or parts: keys of their pieces}; pieces of no part come last."""
    found: dict[str, list[str]] = {}
    for key in keys:
        found.setdefault(", ".join((b.get(key) or a[key]).home), []).append(key)
    rest = found.pop("", [])
    return {**found, **({"elsewhere (any part may depend on it)": rest} if rest else {})}


def print_diff(key: str, old: Any, new: Any, name: str) -> None:
    how = "added" if old is None else "removed" if new is None else "changed"
    where = f"{name}:{new.line}" if new else "gone"
    print(f"  {key}  [{how}, {where}]")
    for line in _diff(old, new):
        print(f"    {line}")


def _diff(old: Any, new: Any) -> list[str]:
    """Return the lines of a piece's unified diff, secrets hidden."""
    lines = [textwrap.dedent(x.text).splitlines() if x else [] for x in (old, new)]
    return [masking.source(line) for line in list(difflib.unified_diff(*lines, lineterm="", n=2))[2:]]


def _masked(row: tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    """Return a row without the values of secrets."""
    name, *values, where = row
    was, now = (masking.HIDDEN if masking.is_secret(name) and v not in ("-", "None") else v for v in values)
    return name, was, now, where


def section(title: str, rows: list[tuple[str, str, str, str]]) -> None:
    """Print `name  old -> new  (where)`, aligned."""
    if not rows:
        return
    print(f"\n{title}")
    width = max(len(row[0]) for row in rows)
    for name, was, now, where in map(_masked, rows):
        print(f"  {name:<{width}}  {was} -> {now}{f'  ({where})' if where else ''}")
