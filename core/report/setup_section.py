"""What a run was started with: its settings, the machine and the versions."""

import re

from trainworthy.core.base import masking
from trainworthy.core.monitoring import cost
from trainworthy.core.report.folder import Folder
from trainworthy.core.report.html import card, esc, table, tag


def settings_section(f: Folder) -> str:
    """Settings in groups; those from the command line are marked."""
    given = {w[2:].split("=")[0].replace("-", "_") for w in f.arguments if w.startswith("--")}
    given |= {re.sub(r"(^|\.)no_(\w+)$", r"\1\2", w) for w in given}
    groups: dict[str, list[list[str]]] = {}
    for key, value in masking.settings(f.settings).items():
        for name, v in (value if isinstance(value, dict) else {"": value}).items():
            path = f"{key}.{name}" if name else key
            text = ", ".join(map(str, v)) if isinstance(v, list) else str(v)
            text = text or "none"
            mark = tag("span", "set", class_="pill accent", title="given on the command line") if path in given else ""
            groups.setdefault(key if name else "recipe", []).append([esc(name or key), esc(text) + mark])
    cards = [card(k, table((), rows, class_="plain")) for k, rows in groups.items()]
    return tag("div", "".join(cards), class_="columns") if cards else ""


def environment_section(f: Folder) -> str:
    e = f.environment
    if not e:
        return ""
    changed = len(e.get("diff", "").splitlines())
    commit = e.get("commit") or "not under version control"
    commit += f", with {changed} lines of uncommitted changes (environment.json)" if changed else ""
    machine = {
        "devices": ", ".join(e.get("devices", [])), "processes": e.get("processes", 1), "commit": commit,
        "platform": e.get("platform", ""), "cores, threads": f"{e.get('cores')}, {e.get('threads')}",
        "memory": f"{e.get('memory_gb')} GB",
    }  # fmt: skip
    if spent := cost.words(cost.of_run(f.path)):
        machine["cost so far" if not f.finished else "cost"] = spent
    cards = ""
    for title, found in (("Machine", machine), ("Versions", e.get("versions", {}))):
        cards += card(title, table((), [[esc(k), esc(v)] for k, v in found.items()], class_="plain"))
    return tag("div", cards, class_="columns")
