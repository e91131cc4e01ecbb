"""Runs of other tools: a TensorBoard folder, or the trainer_state.json of transformers' Trainer, as a folder that the report can read.

Their files are only read. What is made of them is written to `trainworthy-report/` next to them.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from trainworthy.core.base.as_json import finite
from trainworthy.core.base.errors import UserError
from trainworthy.core.base.names import more_is_better
from trainworthy.core.report.folder import number, read_json

STATE, HERE = "trainer_state.json", "trainworthy-report"
HELD_OUT = re.compile(r"^(val|valid|validation|eval|evaluation|test|dev)(?=$|[/_.\- ])[/_.\- ]?", re.IGNORECASE)
TRAINING = re.compile(r"^(train|training)(?=$|[/_.\- ])[/_.\- ]?", re.IGNORECASE)
SPEED = re.compile(r"runtime|per_second|epoch$|jit_compilation|memory|global_step|flos|num_tokens", re.IGNORECASE)
SHARE = re.compile(r"(^|_)(acc|accuracy|f1|auc|auroc|precision|recall|iou|miou|map|exact_match)($|_)", re.IGNORECASE)
RATE = re.compile(r"^(lr|learning_rate)($|[/_.\- ])|(lr|learning_rate)$", re.IGNORECASE)
LOGGED = dict[str, list[tuple[float, float]]]
"""Tag -> [(step, value), ...]"""


def source_of(path: Path) -> Path | None:
    """The file or folder of another tool that `path` is or holds: the newest trainer_state.json, else a folder with TensorBoard's files."""
    if path.name == STATE and path.is_file():
        return path
    if not path.is_dir():
        return None
    if (path / "args.json").is_file() and "recipe" in read_json(path / "args.json"):
        return None
    states = [path / STATE, *path.glob(f"checkpoint-*/{STATE}")]
    states = [p for p in states if p.is_file()]
    if states:  # each checkpoint's holds the log from the first step to its own
        return max(states, key=lambda p: number(read_json(p).get("global_step", -1)))
    return path if _event_folders(path) else None


def _event_folders(folder: Path) -> list[Path]:
    """Folders under it with TensorBoard's files, without those of our own runs (<run>/tb)."""
    homes = sorted({p.parent for p in folder.rglob("events.out.tfevents.*") if HERE not in p.parts})
    return [h for h in homes if not any("recipe" in read_json(up / "args.json") for up in h.absolute().parents[:2])]


def read_foreign(source: Path, *, metric: str, higher: bool | None) -> Path:
    """Write the folder that the report reads; return it."""
    logged, settings = _of_state(source) if source.name == STATE else _of_board(source)
    name, tag, higher = _metric(logged, metric, higher, source)
    rows = _rows(logged, name, tag)
    steps = _steps(logged)
    home = (source.parent if source.is_file() else source) / HERE
    try:
        home.mkdir(exist_ok=True)
    except OSError as error:
        needed = "a folder in which the page may be written"
        raise UserError(f"{home} cannot be written", got=error.strerror, needed=needed) from None
    what = f"{source.parent.name or source.name}, another tool's run"
    settings.setdefault("train", {}).setdefault("epochs", rows[-1].get("epoch", rows[-1]["step"]))
    settings["optim"] = {"schedule": _schedule([r.get("lr", math.nan) for r in (*steps, *rows) if "lr" in r])}
    args = {"recipe": what, "preset": "", "argv": [], "foreign": str(source), "settings": settings}
    (home / "args.json").write_text(json.dumps(args, indent=1))
    for file, found in (("epoch", rows), ("step", steps)):
        (home / f"{file}_metrics.jsonl").write_text("".join(json.dumps(finite(r)) + "\n" for r in found))
    last = rows[-1]
    share = bool(SHARE.search(name)) and all(0 <= r[f"val/{name}"] <= 1 for r in rows)
    summary = {
        "recipe": what, "metric": name, "higher_is_better": higher, "floor": None, "ceiling": 1.0 if share else None, "question": "",
        "best_known": None,
        "steps": int(last["step"]), "epochs": last.get("epoch", 0), "train_seconds": 0.0, "skipped_steps": [],
        "baselines": {}, "foreign": True,
        "reported": {"weights": "final", "step": int(last["step"]), name: last[f"val/{name}"]},
        "metrics": {name: last[f"val/{name}"]}, "final": last,
    }  # fmt: skip
    (home / "summary.json").write_text(json.dumps(finite(summary), indent=1))
    return home


# -------------------------------------------------------------------------------------------------------------- reading
def _of_state(path: Path) -> tuple[LOGGED, dict[str, Any]]:
    """The log of transformers' Trainer."""
    found = read_json(path)
    log = found.get("log_history")
    if not isinstance(log, list):
        raise UserError(f"{path} cannot be read", got="no log_history in it, or it is cut off", needed=f"a {STATE} that transformers wrote",
                        next="the one of an earlier checkpoint")  # fmt: skip
    logged: LOGGED = {}
    for row in log:
        if isinstance(row, dict) and isinstance(row.get("step"), (int, float)):
            for key, value in row.items():
                if key != "step" and (isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")):
                    logged.setdefault(key, []).append((float(row["step"]), number(value)))
    epochs = found.get("num_train_epochs")
    return logged, {"train": {"epochs": float(epochs)} if isinstance(epochs, (int, float)) else {}}


def _of_board(folder: Path) -> tuple[LOGGED, dict[str, Any]]:
    """Scalars of a TensorBoard folder. Folders named train and validation inside it are one run."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        raise UserError("TensorBoard's files need the package 'tensorboard'", next="pip install tensorboard") from None
    from tensorboard.util.tensor_util import make_ndarray

    homes = _event_folders(folder)
    split = {h: h.name for h in homes if h != folder and (HELD_OUT.match(h.name) or TRAINING.match(h.name))}
    single = [h for h in homes if h not in split]
    if len({h.parent for h in split}) + len([h for h in single if h != folder or not split]) > 1:
        found = ", ".join(str(h.relative_to(folder)) for h in homes[:6]) + (" ..." if len(homes) > 6 else "")
        raise UserError(f"{folder} holds several runs", got=found, needed="the folder of one of them",
                        next=f"trainworthy report {homes[0]}")  # fmt: skip
    logged: LOGGED = {}
    for home in homes:
        board = EventAccumulator(str(home), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        series = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
        for tag in board.Tags()["tensors"]:  # TensorFlow 2 writes scalars as tensors
            values = [(e.step, make_ndarray(e.tensor_proto)) for e in board.Tensors(tag)]
            if values and all(v.size == 1 and v.dtype.kind in "fiu" for _, v in values):
                series[tag] = [(s, v.item()) for s, v in values]
        for tag, values in series.items():
            name = f"{split[home]}/{tag}" if home in split else tag
            logged.setdefault(name, []).extend((float(s), float(v)) for s, v in values)
    if not logged:
        raise UserError(f"{folder} holds no scalars", got="TensorBoard files without numbers",
                        needed="a run that logged at least one metric")  # fmt: skip
    return {k: sorted(dict(v).items()) for k, v in logged.items()}, {}


# ------------------------------------------------------------------------------------------------------------- choosing
def _metric(logged: LOGGED, requested: str, higher: bool | None, source: Path) -> tuple[str, str, bool]:
    """Return (name, tag, whether higher is better) of the metric: the requested one, else a held-out score, else a held-out loss."""
    held_out = {HELD_OUT.sub("", tag) or tag: tag for tag in logged if HELD_OUT.match(tag) and not SPEED.search(tag)}
    if requested:
        tag = held_out.get(requested) or (requested if requested in logged else None)
        if tag is None:
            every = [*held_out, *(k for k in logged if not HELD_OUT.match(k) and not SPEED.search(k))]
            known = ", ".join(dict.fromkeys(every[:20]))
            raise UserError(f"{source} has no metric '{requested}'", needed=f"one of: {known}")
        name = HELD_OUT.sub("", tag) or tag
    elif held_out:
        # a score before a loss
        name = min(held_out, key=lambda k: (more_is_better(k) is False, -len(logged[held_out[k]])))
        tag = held_out[name]
    else:
        raise UserError(f"{source} has no metric of held-out data", got=", ".join(list(logged)[:8]), needed="a tag such as val/accuracy or "
                        "eval_loss; advice needs such a curve", next="--metric NAME, to use one of these anyway")  # fmt: skip
    name = name.replace("/", "_")
    return name, tag, more_is_better(name) is not False if higher is None else higher


def _is_training_loss(tag: str) -> bool:
    return not HELD_OUT.match(tag) and bool(re.search(r"loss$", tag, re.IGNORECASE))


def _near(series: list[tuple[float, float]], step: float) -> float:
    """Return the last value up to a step."""
    return next((v for s, v in reversed(series) if s <= step), math.nan)


def _is_rate(tag: str) -> bool:
    return not HELD_OUT.match(tag) and bool(RATE.search(TRAINING.sub("", tag)))


def _rows(logged: LOGGED, name: str, tag: str) -> list[dict[str, Any]]:
    """One row per evaluation: the metric, the mean training loss since the last one, rate and epoch."""
    shortest = sorted(logged, key=len)
    loss = next((logged[t] for t in shortest if _is_training_loss(t)), [])
    rate = next((logged[t] for t in shortest if _is_rate(t)), [])
    epoch = next((logged[t] for t in ("epoch", "train/epoch", "trainer/epoch") if t in logged), [])
    held_out = [t for t in logged if HELD_OUT.match(t) and not SPEED.search(t) and t != tag]
    others = {HELD_OUT.sub("", t).replace("/", "_"): logged[t] for t in held_out}
    rows, before = [], -math.inf
    for step, value in logged[tag]:
        row: dict[str, Any] = {"step": int(step), f"val/{name}": value}
        if epoch:
            row["epoch"] = _near(epoch, step)
        between = [v for s, v in loss if before < s <= step]
        row["train/loss"] = float(np.mean(between)) if between else _near(loss, step)
        if rate:
            row["lr"] = _near(rate, step)
        row |= {f"val/{k}": found[step] for k, v in others.items() if k and step in (found := dict(v))}
        rows.append(row)
        before = step
    return rows


def _steps(logged: LOGGED) -> list[dict[str, Any]]:
    """Rows of the training curves."""
    names = dict.fromkeys(sorted(filter(_is_training_loss, logged), key=len)[:1], "step/loss")
    names |= {t: "step/grad_norm" for t in logged if t.endswith("grad_norm") and not HELD_OUT.match(t)}
    names |= dict.fromkeys(filter(_is_rate, logged), "lr")
    found: dict[float, dict[str, Any]] = {}
    for tag, name in names.items():
        for step, value in logged[tag]:
            found.setdefault(step, {"step": int(step)})[name] = value
    return [found[s] for s in sorted(found)]


def _schedule(rates: list[float]) -> str:
    """Return the schedule. If the learning rate falls to the end, a longer run needs a longer schedule."""
    rates = [r for r in rates if math.isfinite(r)]
    if len(rates) < 3 or max(rates) <= 0 or rates[-1] > 0.5 * max(rates):
        return "constant"
    top = rates.index(max(rates))
    x = np.linspace(0, 1, len(rates) - top)
    y = np.array(rates[top:]) / max(rates)
    end = float(y[-1])
    shapes = {"linear": end + (1 - end) * (1 - x), "cosine": end + (1 - end) * (1 + np.cos(np.pi * x)) / 2}
    return min(shapes, key=lambda k: float(((y - shapes[k]) ** 2).sum()))
