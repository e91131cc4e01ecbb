"""Trains the stages of a run one after the other, and prints the results."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainworthy.core import gates
from trainworthy.core.base import config
from trainworthy.core.base.console import table
from trainworthy.core.base.files import write_whole
from trainworthy.core.base.processes import agreed
from trainworthy.core.gates.checks.exported import WrongExport
from trainworthy.core.loop import shard
from trainworthy.core.loop.run import Run
from trainworthy.core.loop.weights import digest
from trainworthy.core.monitoring import cost, monitors
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.core.monitoring.trackers import mirror
from trainworthy.core.recipe.stage import Metric, Stage
from trainworthy.core.report import bands
from trainworthy.core.report.folder import read_json
from trainworthy.core.session import environment, stages
from trainworthy.core.session.checking import check_stage
from trainworthy.core.session.results import Watcher, finish, load_best, stop_on_exchanged_classes
from trainworthy.core.session.session import Interrupts, Session


def train(session: Session, interrupts: Interrupts) -> None:
    """Train every stage from its seed or its newest checkpoint; then evaluate, export and report."""
    previous: Stage | None = None
    done = 0
    for spec in stages.specs(session.recipe, session.cfg):
        if previous is not None:

            def trained(stage: Stage = previous) -> Stage:
                return stage

            mark = digest(previous.eval_model.state_dict())
            with gates.quick_collections():
                context = stages.context(session, spec, trained, follows="trained", deep=False)
                check_stage(session, spec, context, (), mark=mark)
                del context  # its stages would live while this one trains
        previous, done = train_stage(session, spec, previous, done, interrupts)


def train_stage(
    session: Session, spec: stages.StageSpec, previous: Stage | None, done: int, interrupts: Interrupts
) -> tuple[Stage, int]:
    """Train one stage to its end; return (the stage with the weights that it passes on, steps of all stages so far).
    `done`: steps of earlier stages."""
    cfg, folder = spec.cfg, spec.folder(session.folder)
    s = replace(session, cfg=cfg, folder=folder)
    one = run_of(s, session, done)
    stage = spec.build(one, previous)
    print_length(s, one, stage, f"{spec.name}: " if spec.of > 1 else "")
    follow_evaluations(s, one, stage)
    if folder == session.folder:
        one.journal.healthy = bands.watch(folder, stage.metric)
    if s.main:
        write_metric(folder, stage.metric)
    interrupts.run = one
    try:
        with one.closed_on_error(), monitors.kept(one, stage):
            s.recipe.module.train(cfg, one, stage)
            one.end(stage)
    finally:  # sources that only the loop imports are compared on resume
        if s.main:
            environment.note_sources(session.folder, s.recipe, {})
    interrupts.run = None
    if one.current:
        one.current.batches = []  # the stage refers to its run: the batch would stay in memory while a later stage trains
    one.used_batches, one.used_draws, one.used_optimizers = [], None, []
    one.console.end_bar()
    one.wait_for_checkpoints()
    # A resumed run has already evaluated its earlier stages
    ended = spec.last or not (folder / "summary.json").exists()

    def whole() -> Stage:
        """The same stage with whole weights, for the report and the export."""
        if one.shard == shard.NONE:
            return stage
        alone = replace(cfg, run=replace(cfg.run, shard="none"))
        plain = Run(alone, s.accelerator, folder=folder, console=s.console)
        return shard.gathered_stage(stage, spec.build(plain, previous))

    result = finish(s, one, stage, whole) if agreed(s.accelerator, ended) else {}
    if not spec.last and config.phases(cfg)[spec.name].hand_on == "best":
        load_best(one, stage)
    if not spec.last:
        stage = whole()  # the next stage builds on it, and shards what it keeps
    one.close()
    one.after_eval = None  # it holds the watcher's samples
    if s.main and result:
        print_result(s, stage, result, cost_of=session.folder)
    if s.main and spec.last:
        at_chance = result.get("warning", "").startswith(monitors.NO_RESULT)
        command = f"trainworthy lr {s.recipe.target}" if at_chance else query_command(s.recipe.module, s.folder)
        hint = f"\nnext   {command}" * bool(command)
        files = {"report": "report.html", "card": "card.md", "export": "export"}
        s.console.say("".join(f"\n{k:<6} {s.folder / name}" for k, name in files.items()) + hint)
    if wrong := agreed(s.accelerator, result.get("wrong")):
        raise WrongExport(f"the export in {s.folder / 'export'} is not what was scored: {wrong[0].measured}\n"
                          f"  needed:       {wrong[0].needed}\n  likely cause: {wrong[0].remedy.splitlines()[0]}\n"
                          f"  next:         fix export(), then start a new run; weights: {s.folder / 'checkpoints'}")  # fmt: skip
    return stage, done + one.step


def query_command(module: Any, folder: Path) -> str:
    """Return the command that queries the export; empty if there is none."""
    if hasattr(module, "speaker"):
        return f"trainworthy chat {folder}"
    able = hasattr(module, "asker") or (folder / "export" / "use.py").is_file()
    return f"trainworthy predict {folder} FILE" if able else ""


def run_of(s: Session, session: Session, done: int) -> Run:
    """The run of one stage, `s`, of a `session`. `done`: steps of earlier stages, since trackers show one step axis."""
    log = mirror(s.accelerator, s.console)
    also = None if log is None else lambda row, step: log(row, done + step)
    tracker = MetricsTracker(s.folder, use_tensorboard=s.cfg.run.tensorboard, also=also) if s.main else None
    one = Run(s.cfg, s.accelerator, folder=s.folder, home=session.folder, tracker=tracker, console=s.console)
    one.identity = session.identity
    return one


def print_length(s: Session, one: Run, stage: Stage, named: str) -> None:
    """Print how many steps a stage takes, of what, and into which folder."""
    steps, train, data = one.total_steps(stage), s.cfg.train, stage.data.get("train")
    if data is None:
        what = f"iterations that collect their own samples, {train.batch_size} to an update"
    else:
        read = min(train.epochs, steps * train.batch_size / len(data)) if train.max_steps else train.epochs
        what = f"steps of {train.batch_size} samples, {read:.4g} epochs"
    s.console.say(f"train  {named}{steps:,} {what}, into {s.folder}")
    if data is None or train.max_steps:
        return
    if short := monitors.short_run(steps, train.epochs, read_json(s.folder / "gates.json").get("gates", [])):
        s.console.say(f"  {short}")


def follow_evaluations(s: Session, one: Run, stage: Stage) -> None:
    """Keep samples, scores by class and device readings at each evaluation, and what the untrained model does."""
    watcher = Watcher(one, stage)

    def after_eval(step: int) -> None:
        watcher.look(step)
        stop_on_exchanged_classes(one, stage)
        if s.meter:
            s.meter.note()

    one.after_eval = after_eval
    watcher.before()


def write_metric(folder: Path, metric: Metric) -> None:
    """Write metric.json, from which a run that never finishes is reported."""
    ends = {"floor": metric.floor, "ceiling": metric.ceiling}
    values = {"metric": metric.name, "higher_is_better": metric.higher_is_better, "question": metric.question}
    values |= {k: v if v is not None and math.isfinite(v) else None for k, v in ends.items()}
    write_whole(folder / "metric.json", json.dumps(values, indent=1))


def print_result(s: Session, stage: Stage, result: dict[str, Any], *, cost_of: Path) -> None:
    """Print what a stage reached: warnings first, the table of results, the cost of the run in `cost_of`."""
    if result["outside"]:
        s.console.say(f"\nOUTSIDE the healthy band: {result['outside']}", style="bold red")
    if result["warning"]:
        s.console.say(f"\n{result['warning']}\nwhat to try: report.html, section What next", style="bold red")
    of = f"{s.cfg.run.export} weights, {len(stage.data['val']):,} held-out samples" + "; gates OFF" * (
        not s.cfg.gates.enabled
    )
    s.console.say(f"\nresult {stage.metric.question}  ({of})")
    s.console.say(table(result["table"]))
    if s.meter:
        s.meter.note(now=True)
    s.console.say(f"\ncost   {cost.words(cost.of_run(cost_of))}")
