"""Decides when a checkpoint is due, collects what it holds, and restores it."""

from __future__ import annotations

import functools
import json
import time
from typing import TYPE_CHECKING, Any

from trainworthy.core.base.errors import UserError
from trainworthy.core.base.processes import agreed, gathered
from trainworthy.core.loop import checkpoint, shard
from trainworthy.core.loop.checkpoint_survey import Readers
from trainworthy.core.loop.journal import Halt
from trainworthy.core.loop.resumable import assert_own
from trainworthy.core.loop.weights import frozen_digest, load_into, stream_weights, weights
from trainworthy.core.recipe.stage import Stage

if TYPE_CHECKING:
    from trainworthy.core.loop.run import Run


def is_due(run: Run) -> bool:
    """Return whether a save by steps or by time is due. All ranks save together, so rank 0's clock decides. It is
    sent to the others only at steps where metrics are read back, so that no other step has to wait."""
    settings = run.cfg.run
    if settings.save_steps and run.step % settings.save_steps == 0:
        return True
    if not settings.save_minutes or (run.world > 1 and run.step % settings.log_every):
        return False
    due = time.monotonic() - run.saved_at >= 60 * settings.save_minutes
    return bool(agreed(run.accelerator, due))


def save(run: Run, stage: Stage) -> None:
    """Let rank 0 save a complete state. Order, draws and rates are functions of seed and step, so they need no
    saving."""
    if (checkpoints := run.checkpoints) is None:
        return

    stateful = {k: s.state_dict() for k, s in stage.state.items()}  # called on every rank, because it may gather parts

    def state() -> dict[str, Any]:
        optimizers = {k: o.state_dict() for k, o in stage.optimizers.items()}
        return {"optimizers": optimizers, "stateful": stateful, "scaler": run.scaler.state_dict()}

    def info() -> dict[str, Any]:
        return {"stage": stage.name, "run": run.identity, **run.journal.state(), "finished": run.finished,
                "seconds": run.seconds, "frozen": frozen_digest(run, stage)}  # fmt: skip

    def save() -> None:
        if run.tracker:
            run.tracker.flush()
        checkpoints.save(run.step, stage.model, state(), info(), without=stage.not_saved)

    if run.shard != shard.NONE:
        if run.tracker:
            run.tracker.flush()
        shard.save(run, stage, state(), info())
    else:
        run.on_rank_0(save)
    run.saved_at = time.monotonic()
    run.mode.saved(run)


def record(run: Run, stage: Stage, metrics: dict[str, float]) -> None:
    """Write an evaluation of the current weights, and the weights if they are among the best."""
    step = run.current.index + 1 if run.current else run.step
    run.flush(stage)
    epoch, message = run.journal.evaluated(stage, step, metrics)
    name, best, checkpoints = stage.metric.name, run.journal.best, run.checkpoints

    is_best = checkpoints is not None and (metrics[name], step) in best
    written = None
    if checkpoints and is_best and run.shard != shard.NONE:
        written = checkpoints.folder / ".best-of-shards"
        run.on_rank_0(checkpoints.wait)  # for the file of the last one
        tensors, aliases = weights(stage.eval_model, without=stage.not_saved, sharded=True)
        problem = stream_weights(None if run.rank else written, tensors, aliases)

        def assert_written() -> None:
            if problem:
                raise checkpoints.failed(problem)

        run.on_rank_0(assert_written)

    def keep_best() -> None:
        if checkpoints and is_best:
            info = {"metric": name, "value": metrics[name], "epoch": epoch}
            checkpoints.save_best(step, stage.eval_model, info, metric=name, best=[s for _, s in best],
                                  without=stage.not_saved, written=written)  # fmt: skip

    if checkpoints:
        run.on_rank_0(keep_best)
    if run.after_eval:
        run.after_eval(step)
    run.journal.clock = time.monotonic()  # the next step's rate excludes the evaluation
    run.console.say(message)
    try:
        run.journal.check_history(stage)
    except Halt:  # within a step, only the best weights can be saved, and they are
        run.close()
        raise


def restore(run: Run, stage: Stage) -> int:
    """Load the newest complete checkpoint of this stage, if there is one; return the steps already done."""
    folder = run.mode.checkpoints_in(run)
    if folder is None:
        return 0
    home, settings = folder / "checkpoints" / stage.name, run.cfg.run
    run.checkpoints = checkpoint.Checkpoints(home, keep=settings.keep_checkpoints, keep_every=settings.keep_every)
    run.on_rank_0(run.checkpoints.clean)
    together = Readers(run.rank, run.world, functools.partial(gathered, run.accelerator))
    newest, damaged = run.checkpoints.survey(together)
    for name, why in damaged.items():
        run.console.say(f"  skipped checkpoint {name}: {why}")
    if run.tracker and newest is None:
        run.tracker.truncate(after_step=0)
    if newest is None:
        return 0
    assert_own(newest, run.identity)
    info = json.loads((newest / "info.json").read_text())
    model, state = shard.load(newest, stage) if shard.is_in(newest) else run.checkpoints.load(newest)[:2]
    if info["frozen"] != frozen_digest(run, stage):
        raise UserError(f"the frozen weights are not those of {newest}", needed="the model this run was started with",
                        cause="its files were changed or replaced", next="start a new run")  # fmt: skip
    load_into(stage.model, model, where=str(newest), without=stage.not_saved)
    for name, optimizer in stage.optimizers.items():
        optimizer.load_state_dict(shard.optimizer_state(state["optimizers"][name], optimizer))
    for name, stateful in stage.state.items():
        own = stateful.state_dict() if run.shard != shard.NONE else None
        stateful.load_state_dict(shard.stateful_state(state["stateful"][name], own))
    if run.scaler.is_enabled():
        run.scaler.load_state_dict(state["scaler"])
    run.journal.restore(info)
    run.finished, run.seconds, run.step = info["finished"], info["seconds"], info["step"]
    if run.tracker:
        run.tracker.truncate(after_step=info["step"])
    run.console.say(f"  resumed from {newest.name} ({newest})")
    return info["step"]
