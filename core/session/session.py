"""One command in one process: devices, run folder, lock, signals, and the files written before training."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator
from trainworthy.core import gates, report
from trainworthy.core.base import config, interrupts, locks, masking, network, settings_check
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import SIGNALS, Interrupted, Signalled, Stop, UserError
from trainworthy.core.base.files import stamp, write_whole
from trainworthy.core.base.locks import held
from trainworthy.core.base.processes import agreed, launcher_words
from trainworthy.core.data import contents as hashed
from trainworthy.core.gates import order
from trainworthy.core.loop import init_from, shard
from trainworthy.core.loop.precision import precision
from trainworthy.core.loop.run import Run
from trainworthy.core.monitoring import trackers
from trainworthy.core.monitoring.cost import Meter
from trainworthy.core.recipe import loading as recipes
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.report.folder import ENDED
from trainworthy.core.session import (
    accelerate_config,
    environment,
    memory_check,
    nodes,
    on_end,
    process_end,
    stages,
    stopped_processes,
)


@dataclass
class Session:
    """One process's view of one command."""

    recipe: recipes.Recipe
    cfg: config.Config
    preset: str
    accelerator: Accelerator
    console: Console
    folder: Path
    argv: list[str]
    start: init_from.Start | None = None
    resumes: Literal["", "as it was", "forced"] = ""
    """Whether it continues an earlier run; `forced`: even if its data changed."""
    meter: Meter | None = None
    """Counts what the run costs, on rank 0."""
    command: str = ""
    """The command that made the folder, where it is neither `run` nor `check`."""

    @cached_property
    def identity(self) -> dict[str, object]:
        """Recipe, seed and settings of the training, which every checkpoint of this run stores."""
        settings = masking.settings(config.to_dict(self.cfg))
        settings["train"]["precision"] = precision(self.cfg, self.accelerator)
        for name in ("run", "gates", "loader", "track"):  # they may change: where and how often to save and log
            del settings[name]
        settings["environment"] = recipes.variables(self.recipe)
        return {"recipe": self.recipe.id, "seed": self.cfg.run.seed, "settings": settings}

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process


def open_session(loaded: recipes.Recipe, cfg: config.Config, preset: str, argv: list[str], *, kind: str = "",
                 only: tuple[str, ...] = (), folder: Path | None = None) -> Session:  # fmt: skip
    """Set up devices, processes and the run folder. Everything that can fail early fails here."""
    torch.set_num_threads(cfg.run.threads or torch.get_num_threads())
    accelerate_config.from_environment()
    accelerator = Accelerator(log_with=trackers.names(cfg) or None)
    engine = accelerator.distributed_type.value
    accelerate_config.refuse([engine], accelerator.mixed_precision, "what accelerate started")
    environment.assert_processes(accelerator.num_processes)
    stopped_processes.watch(accelerator)
    console = Console(quiet=not accelerator.is_main_process)
    if warning := memory_check.cpu_warning(loaded, cfg, preset, accelerator):
        console.say(warning, style="yellow")
    start = check_settings(loaded, cfg, accelerator, (*cfg.gates.waive, *(x for x in only if x != order.OWN)))
    if not kind and folder is None:  # a resumed run may continue on any device
        memory_check.refuse(loaded, cfg, preset, accelerator)
    if folder is None:
        folder = agreed(accelerator, cfg.run.out / loaded.slug / kind / stamp())
    problem = None
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
        except OSError as error:
            problem = UserError(f"the run folder {folder} cannot be written", got=error.strerror,
                                next="choose another place with --run.out FOLDER")  # fmt: skip
    together(accelerator, problem)
    environment.assert_shared(folder, accelerator)
    n = accelerator.num_processes
    devices = f"{n} x {accelerator.device.type}" if n > 1 else str(accelerator.device)
    sharding = f" · shard {cfg.run.shard}" if n > 1 else " · one process, so nothing to shard"
    sharding = "" if cfg.run.shard == shard.NONE else sharding
    console.say(f"{loaded.id} · {preset} · seed {cfg.run.seed} · {devices} · {precision(cfg, accelerator)}{sharding}")
    if start:
        console.say(f"{start.describe()}\n       fine-tuning: fresh optimiser, peak rate {cfg.optim.lr:g}, warm-up "
                    f"{cfg.optim.warmup:g} (unless given: a seventh of the preset's rate, 0.03)")  # fmt: skip
    meter = Meter(folder, accelerator.device, accelerator.num_processes) if accelerator.is_main_process else None
    on_end.run_folder(folder)
    nodes.keep_folder(folder)
    session = Session(loaded, cfg, preset, accelerator, console, folder, argv, start, meter=meter)
    _ = session.identity  # now, before a recipe's own code changes a setting
    return session


def check_settings(
    loaded: recipes.Recipe, cfg: config.Config, accelerator: Accelerator, names: tuple[str, ...]
) -> init_from.Start | None:
    """Raise for invalid values and unknown gates before a folder is made; report what --init-from loaded."""
    known, start = [g.id for g in order.ORDER], None
    for spec in stages.specs(loaded, cfg):
        settings_check.check_values(spec.cfg, processes=accelerator.num_processes)
    with explain_data_errors(loaded, cfg):
        built = stages.untrained(loaded, cfg, accelerator)
    shard.assert_supported(loaded.id, [stage for _, stage in built], cfg, precision=precision(cfg, accelerator))
    memory_check.check(loaded, cfg, accelerator, [(spec.name, stage) for spec, stage in built])
    for spec, stage in built:
        known += [g.id for g in order.of_stage(stage, sharded=shard.mode(cfg, accelerator.num_processes) != shard.NONE)]
        if spec.cfg.init_from:
            start = init_from.report(stage, Path(spec.cfg.init_from), trust_pickle=cfg.trust_pickle)
        if "train" in stage.data and (n := len(stage.data["train"])) < 2:
            raise UserError("the training set is too small", got=f"{n} sample(s)", needed="2 or more")
        assert_validation_size(stage, cfg)
    for name in names:
        if name not in known and (now := config.renamed(name, known)):
            raise UserError(f"the gate '{name}' has a new name", needed=now, next="docs/migration.md")
        if name not in known:
            raise config.unknown(f"gate '{name}'", name, known, next=f"trainworthy check {loaded.target}")
    return start


def assert_validation_size(stage: Stage, cfg: config.Config) -> None:
    """Raise UserError if the validation split is too small: one sample, or fewer samples than classes."""
    val, needed = stage.data["val"], 2
    key = gates.categorical(val)
    if key is not None and len(val) and hashed.plain(val.peek(0, key)) is not None:  # samples have one class each
        checked = cfg.gates.enabled and "data" not in cfg.gates.waive
        needed = max(needed, len(val.fields[key].classes)) if checked else needed
    if len(val) < needed:
        classes = f": one of each class of '{key}'" if needed > 2 else ""
        choice = "--data.val FOLDER or a share (0.2), or " if hasattr(getattr(cfg, "data", None), "val") else ""
        raise UserError("the validation split is too small for an evaluation", got=f"{len(val)} sample(s)",
                        needed=f"at least {needed}{classes}; with 100, 90% can be distinguished from 80%",
                        cause="a split by a share of few samples, or a folder of held-out samples that is not complete",
                        next=f"{choice}more held-out data, then the same command again")  # fmt: skip


@contextlib.contextmanager
def explain_data_errors(loaded: recipes.Recipe, cfg: config.Config) -> Iterator[None]:
    """Turn data errors into messages. An OSError or ValueError inside means missing or wrong data, and becomes one
    message with the recipe's line. A failed connection becomes a message with the offline alternative. Other errors
    (TypeError, KeyError, ...) are bugs and keep their traceback."""
    try:
        yield
    except Stop:
        raise
    except Exception as error:
        if network.unreachable(error):
            raise network.refusal(f"what {loaded.id} is made of", error, config.to_dict(cfg)) from None
        if isinstance(error, ModuleNotFoundError) and error.name:
            raise recipes.not_found(loaded.entry, error) from None
        if not isinstance(error, (OSError, ValueError)):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((f for f in reversed(frames) if f.filename == str(loaded.entry.path)), None)
        if frame is None:
            raise
        raise UserError(
            f"{loaded.id} cannot read its data or build its model", got=f"{type(error).__name__}: {error}",
            cause=f"{frame.filename}:{frame.lineno}: {frame.line}", next=f"fix it, then: trainworthy check {loaded.target}",
        ) from None  # fmt: skip


def together(accelerator: Accelerator, problem: Stop | None) -> None:
    """Raise rank 0's problem on every rank: one that stops alone leaves the others waiting."""
    problem = agreed(accelerator, problem)
    if problem is not None:
        raise problem


def in_use(folder: Path) -> UserError:
    """Return the message about a run folder that another process has, with its id."""
    pid = locks.holder(folder / ".lock")
    return UserError(
        f"{folder} is in use by another process", got=f"process {pid}" if pid else "", needed="one process at a time",
        cause="it was resumed twice, or is still running", next=f"kill {pid}, which saves and ends it, then again" if pid else "",
    )  # fmt: skip


@contextlib.contextmanager
def session_lock(session: Session) -> Iterator[None]:
    """Lock the run folder for one group of processes; refuse a second one."""
    with held(session.folder / ".lock", wait=False) if session.main else contextlib.nullcontext(True) as got:
        problem = None if got else in_use(session.folder)
        together(session.accelerator, problem)
        yield


@contextlib.contextmanager
def reported(session: Session) -> Iterator[None]:
    """Write a report page for every planned end."""
    verb = session.command or ("check" if session.folder.parent.name == "checks" else "run")
    again = shlex.join(["trainworthy", verb, *session.argv, *launcher_words(session.accelerator)])
    try:
        yield
    except Signalled as arrived:
        message, code = process_end.signalled(str(arrived), session.folder, again)
        stop: Stop = Interrupted(message, code=code)
        stop.restart = str(arrived) == "SIGTERM" and not nodes.user_stopped()  # else torchrun sent it
    except Stop as planned:
        stop = planned
    except (Exception, SystemExit) as error:  # a recipe's own sys.exit() is no planned end
        stop = process_end.crashed(error, session.folder, again)
    else:
        if session.main:
            session.meter.note(now=True)
            try:
                report.write(session.folder)
            except OSError as error:  # all else is written, so there is nothing to resume
                raise Stop(f"the command is done, but its report cannot be written: {error}\n  next:         make room, then: "
                           f"trainworthy report {session.folder}") from None  # fmt: skip
        return
    if stop.restart and nodes.restarts_left():
        raise process_end.Restarted(stop)
    if not isinstance(stop, UserError):  # what is refused leaves the folder as it was
        if session.meter:
            session.meter.note(now=True)
        if session.main:
            with contextlib.suppress(OSError):  # a full disk must not hide the first error
                end = {"exit_code": stop.exit_code, "message": str(stop).strip()}
                write_whole(session.folder / ENDED, json.dumps(end, indent=1))
    planned = not (isinstance(stop, process_end.Crashed) and stop.trace)
    if process_end.speaks(stop.exit_code, planned=planned):  # of several processes, only the one that reports
        with contextlib.suppress(Exception):  # a full disk must not hide the first error
            report.write(session.folder)
    raise stop


class Interrupts:
    """Handles SIGTERM, Ctrl-C, SIGHUP and SIGUSR1. During training they request a save and a stop after the step;
    before it they end the process. A second Ctrl-C does not wait."""

    def __init__(self) -> None:
        self.run: Run | None = None

    def handled(self) -> contextlib.AbstractContextManager[None]:
        ours = "TRAINWORTHY_EXIT" in os.environ  # else keep ignored signals ignored (nohup)
        numbers = [n for n in SIGNALS if ours or signal.getsignal(n) != signal.SIG_IGN]
        return interrupts.handled(self._ask, numbers)

    def _ask(self, name: str) -> None:
        if self.run is None or (self.run.signal and name == "SIGINT"):
            raise Signalled(name)
        self.run.signal = name


def write_start(session: Session) -> None:
    """Write args.json, environment.json and the recipe's source before training. A stage's folder gets the stage's own
    settings."""
    s = session
    if not s.main:
        return
    *earlier, last = stages.specs(s.recipe, s.cfg)
    for spec in earlier:
        stage_folder = spec.folder(s.folder)
        stage_folder.mkdir(parents=True, exist_ok=True)
        _write_args(replace(s, cfg=spec.cfg), stage_folder, stage=spec.name)
    own, fallbacks = masking.settings(config.to_dict(last.cfg)), s.recipe.fallbacks
    more = {"last_stage": {k: own[k] for k in ("train", "optim")}} if earlier or fallbacks else {}
    _write_args(s, s.folder, **more, **({"fallbacks": fallbacks, "stage": last.name} if fallbacks else {}))
    write_whole(s.folder / "environment.json", json.dumps(environment.collect(s.recipe, s.accelerator), indent=1))
    shutil.copy(s.recipe.entry.path, s.folder / "recipe.py")


def _write_args(s: Session, folder: Path, **more: object) -> None:
    args = {"recipe": s.recipe.target, "preset": s.preset, "argv": masking.words(s.argv),
            "processes": s.accelerator.num_processes, "settings": masking.settings(config.to_dict(s.cfg)),
            "start": s.start and asdict(s.start), **({"command": s.command} if s.command else {}), **more}  # fmt: skip
    # A resumed run uses the launcher's choices.
    args["settings"]["train"]["precision"] = precision(s.cfg, s.accelerator)
    write_whole(folder / "args.json", json.dumps(args, indent=1))
