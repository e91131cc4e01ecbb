"""Results of a run: inputs and predictions over time, the final evaluation with its baselines, the export."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from trainworthy.core import gates
from trainworthy.core.base import seeds
from trainworthy.core.base.files import write_whole
from trainworthy.core.data.pictures import contact_sheet, png
from trainworthy.core.gates.checks import exported, paths
from trainworthy.core.gates.checks.batch_norm import by_batch, layers
from trainworthy.core.loop import shard
from trainworthy.core.loop.journal import Halt
from trainworthy.core.loop.run import Run, evaluating
from trainworthy.core.loop.weights import load_into, load_weights, save_weights, weights
from trainworthy.core.monitoring import monitors
from trainworthy.core.monitoring.metrics import read_rows
from trainworthy.core.recipe.stage import Stage, Tile, View
from trainworthy.core.report.card import measured, write_card, write_model_card
from trainworthy.core.report.folder import read_json
from trainworthy.core.session.session import Session


class Watcher:
    """Images of the model's inputs, and its predictions on one fixed batch over time."""

    def __init__(self, run: Run, stage: Stage, n: int = 16):
        self.run, self.stage = run, stage
        val = stage.data["val"]
        self.path = run.folder / "previews"
        seed = run.cfg.run.seed
        self.batch = gates.fetch(val, gates.pick(val, min(n, len(val)), seed), None, run.device)
        train = stage.data.get("train")
        self.seen = train and gates.fetch(train, gates.pick(train, min(2 * n, len(train)), seed), seed, run.device)

    def before(self) -> None:
        """Show the model's inputs on the training path and on the evaluation path."""
        if self.run.rank or not self.stage.preview:
            return
        for name, batch in (("train", self.seen), ("val", self.batch)) if self.seen else (("val", self.batch),):
            tiles = self.stage.preview({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
            contact_sheet(tiles, self.path / f"inputs_{name}.png")
            folder = self.path / name
            folder.mkdir(parents=True, exist_ok=True)
            for i, tile in enumerate(tiles):
                if tile.image is not None:
                    (folder / f"{i:02d}.png").write_bytes(png(tile.image))
            (folder / "captions.json").write_text(json.dumps([t.caption for t in tiles]))

    def look(self, step: int) -> None:
        """Predict the fixed batch, one row per evaluation; a resumed run writes its rows again."""
        # Else all ranks predict the same batch, since each forward needs all shards
        whole = self.run.shard == shard.NONE
        if not self.stage.predict or (self.run.rank and whole):
            return
        with evaluating(self.stage.eval_model), self.run.autocast():
            tiles: list[Tile] = self.stage.predict(self.stage.eval_model, self.batch)
        if self.run.rank:
            return
        if any(t.image is not None for t in tiles):
            contact_sheet(tiles, self.path / "predictions" / f"step-{step}.png")
        path = self.path / "predictions.jsonl"
        rows = [r for r in read_rows(path) if r["step"] < step]
        rows.append({"step": step, "captions": [t.caption for t in tiles], "good": [t.score for t in tiles]})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps(r) + "\n" for r in rows))


def stop_on_exchanged_classes(run: Run, stage: Stage) -> None:
    """Stop a run whose held-out classes are predicted under each other's names. It checks after evaluation 1, 2, 4, 8,
    ...: cheap, and a resumed run checks at the same ones."""
    n = len(run.journal.history)
    if stage.confusion is None or run.rehearsal or n & (n - 1):
        return
    found = paths.check_classes(run, stage)
    if found and found.blocks:
        run.close()
        raise Halt(f"{found.measured}\n  needed:       {found.needed}\n  likely cause: {found.remedy}\n"
                   f"  next:         one list of classes for all splits, then a new run; evidence in {run.folder}",
                   keep=False)  # fmt: skip


def finish(s: Session, run: Run, stage: Stage, whole: Callable[[], Stage]) -> dict[str, Any]:
    """Write the final evaluation with baselines, figures, export, summary.json and card.md. `whole`: makes the same
    stage with unsharded weights, for what is drawn and exported."""
    metric, cfg = stage.metric, s.cfg
    if not run.journal.history or run.journal.history[-1]["step"] != run.step:
        run.evaluate(stage)  # the loop ended without an evaluation
    final, chosen_step = _reported(run, stage, cfg.run.export)
    intervals = {"val": stage.intervals()} if stage.intervals else {}
    inputs = tuple(k for k, f in stage.data["val"].fields.items() if f.role == "input")
    val, test = stage.data["val"], stage.data.get("test")
    tested = run.measure(stage, test) if test else None  # once, with the reported weights
    if tested and stage.intervals:
        intervals["test"] = stage.intervals()
    zeroed = run.measure(stage, View(val, range(len(val)), blank=inputs)) if inputs else None
    gap, norms = _on_training_samples(run, stage, final[metric.name])
    classes = paths.check_classes(run, stage)
    if gap and classes and classes.blocks:
        gap.because = classes.remedy
    stage = whole()
    with evaluating(stage.eval_model), run.autocast():
        figures = stage.figures(stage.eval_model, val) if stage.figures else {}
    with evaluating(stage.eval_model), run.autocast():
        baselines = stage.baselines()  # on every rank, because a baseline's model may be evaluated on all of them
    if not s.main:
        return {}
    run.tracker.flush()
    if zeroed:
        baselines |= {"this model, input zeroed": {metric.name: zeroed[metric.name]}}
    others = {k: m[metric.name] for k, m in baselines.items() if _ignorant(k) and metric.name in m}
    warning = _warning(run, stage, final[metric.name], others)
    export = s.folder / "export"
    export.mkdir(exist_ok=True)
    stage.export(export) if stage.export else save_weights(export / "model.safetensors", *weights(stage.eval_model))
    read = [exported.at_end(run, stage, export)] if stage.exported else []
    monitors.write(run, [*read, *([classes] if classes else []), *monitors.of(run, stage, gap, norms)])
    summary = {
        "recipe": s.recipe.id, **_about(run, stage), "warning": warning,
        "reported": {"weights": cfg.run.export, "step": chosen_step, metric.name: final[metric.name]},
        "metrics": final, "test": tested and {"samples": len(test), "metrics": tested}, "intervals": intervals,
        "baselines": baselines, "figures": {k: [*map(asdict, v)] if isinstance(v, list) else asdict(v) for k, v in figures.items()},
    }  # fmt: skip
    # written last: this file marks the run as finished
    write_whole(s.folder / "summary.json", json.dumps(summary, indent=1, default=_plain))
    if s.meter:
        s.meter.note(now=True)  # for the card
    write_card(s.folder, stage.model_card.get("usage", ""))
    if stage.model_card:
        write_model_card(s.folder, stage.model_card)
    return {"table": measured(summary), "wrong": [v for v in read if v.blocks], "warning": warning,
            "outside": run.journal.outside}  # fmt: skip


def _warning(run: Run, stage: Stage, value: float, others: dict[str, float]) -> str:
    """Return why the result `value` needs a warning, with its cause if the gates measured one; empty if it needs none."""
    best = value if run.cfg.run.export == "best" else run.journal.best[0][0]
    warning = monitors.warning_of_result(stage.metric, value, best, others)
    if not warning or stage.probe is not None:
        return warning
    rows = read_json(run.folder / "gates.json").get("gates", [])
    return warning + monitors.too_few_steps(stage.metric, value, run.step, run.journal.history[-1]["epoch"], rows)


def _about(run: Run, stage: Stage) -> dict[str, Any]:
    """Return what summary.json says of the stage and its training, without what is measured at the end."""
    metric, journal, train = stage.metric, run.journal, stage.data.get("train")
    trained = sum(p.numel() for p in stage.parameters().values())
    best = [{"step": step, metric.name: value} for value, step in journal.best]
    return {
        "stage": stage.name, "question": metric.question, "metric": metric.name, "higher_is_better": metric.higher_is_better,
        "floor": metric.floor, "ceiling": metric.ceiling if math.isfinite(metric.ceiling) else None,
        "best_known": metric.best_known, "outside": journal.outside, "final": journal.history[-1], "best": best[0], "n_best": best,
        "evaluations": len(journal.history), "bounds": stage.upper_bounds, "seeds": [run.cfg.run.seed],
        "steps": run.step, "planned_steps": run.total_steps(stage), "epochs": journal.history[-1]["epoch"],
        "train_seconds": round(run.seconds, 1), "skipped_steps": journal.skipped,
        "parameters": sum(p.numel() for p in stage.model.parameters()), "trained_parameters": trained,
        "parameters_per_sample": train and round(trained / len(train), 2),
    }  # fmt: skip


def _reported(run: Run, stage: Stage, which: str) -> tuple[dict[str, float], int]:
    """Load the weights that are reported (`which`: final or best); return their metrics and their step."""
    history = run.journal.history
    if which == "best":
        run.checkpoints.wait()
        run.accelerator.wait_for_everyone()
        load_best(run, stage)
        return run.measure(stage, stage.data["val"]), run.journal.best[0][1]
    # A resumed run may have nothing left to train
    if stage.evaluate_while_training or (stage.intervals and not stage.intervals()):
        measured = run.measure(stage, stage.data["val"])
        history[-1] |= {f"val/{k}": v for k, v in measured.items()}
        return measured, history[-1]["step"]
    return {k.removeprefix("val/"): v for k, v in history[-1].items() if k.startswith("val/")}, history[-1]["step"]


def load_best(run: Run, stage: Stage) -> None:
    file = run.checkpoints.best_weights(stage.metric.name)
    load_into(stage.eval_model, load_weights(file), where=str(file), without=stage.not_saved)


def _on_training_samples(run: Run, stage: Stage, held_out: float) -> tuple[monitors.Gap | None, monitors.Norms | None]:
    """Measure as many training samples as there are held-out ones: the gap between the two, and what a batch's own
    statistics change."""
    train, metric = stage.data.get("train"), stage.metric
    if not train:
        return None, None
    n = min(len(stage.data["val"]), stage.expect.at_most(1000, times=16))
    among = train.representative(min(len(train), 4 * n))
    some = View(train, [among[i] for i in seeds.permutation(len(among), run.cfg.run.seed, "gap").tolist()[:n]])
    gap = monitors.Gap(metric, run.measure(stage, some)[metric.name], held_out, samples=n)
    if not layers(stage.eval_model):
        return gap, None
    with by_batch(stage.eval_model):
        return gap, monitors.Norms(metric, gap.train, run.measure(stage, some)[metric.name])


def _ignorant(baseline: str) -> bool:
    """Return whether this baseline ignores the input, so that any trained model must beat it."""
    return any(word in baseline.lower() for word in ("input zeroed", "untrained", "random", "majority"))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else str(value)
