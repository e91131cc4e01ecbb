"""One command in one process: devices, run folder, lock, signals, and what is written before anything is spent."""

import contextlib
import json
import secrets
import shutil
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from trainworthy.core import gates, report
from trainworthy.core.base import config
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import Interrupted, Stop, UserError
from trainworthy.core.gates import order
from trainworthy.core.loop import init_from
from trainworthy.core.loop.run import Run, precision
from trainworthy.core.monitoring import trackers
from trainworthy.core.recipe import loading as recipes
from trainworthy.core.session import environment, stages

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None


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

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process


def open_session(loaded: recipes.Recipe, cfg: config.Config, preset: str, argv: list[str], *, kind: str = "",
                 only: tuple[str, ...] = (), folder: Path | None = None) -> Session:  # fmt: skip
    """Devices, processes and the run folder; whatever can fail cheaply fails here."""
    torch.set_num_threads(cfg.run.threads or torch.get_num_threads())
    accelerator = Accelerator(log_with=trackers.names(cfg) or None)
    environment.assert_processes(accelerator.num_processes)
    console = Console(quiet=not accelerator.is_main_process)
    start = check_settings(loaded, cfg, accelerator, (*cfg.gates.waive, *only))
    if folder is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = cfg.run.out / loaded.slug / kind / f"{stamp}-{secrets.token_hex(2)}"
        folder = gates.agreed(accelerator, folder)
    problem = None
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
        except OSError as error:
            problem = UserError(f"the run folder {folder} cannot be written", got=error.strerror,
                                next="choose another place with --run.out FOLDER")  # fmt: skip
    together(accelerator, problem)
    devices = (
        f"{accelerator.num_processes} x {accelerator.device.type}"
        if accelerator.num_processes > 1
        else str(accelerator.device)
    )
    console.say(f"{loaded.id} · {preset} · seed {cfg.run.seed} · {devices} · {precision(cfg, accelerator)}")
    if start:
        console.say(f"{start.lines()}\n       fine-tuning: fresh optimiser, peak rate {cfg.optim.lr:g}, warm-up "
                    f"{cfg.optim.warmup:g} (unless given: a seventh of the preset's rate, 0.03)")  # fmt: skip
    return Session(loaded, cfg, preset, accelerator, console, folder, argv, start)


def check_settings(
    loaded: recipes.Recipe, cfg: config.Config, accelerator: Accelerator, names: tuple[str, ...]
) -> init_from.Start | None:
    """Values that cannot work and gates that nobody knows, told before a folder is made; what --init-from loaded."""
    known, start = [g.id for g in order.ORDER], None
    for part in stages.parts(loaded, cfg):
        config.check_values(part.cfg, processes=accelerator.num_processes)
    with told(loaded):
        built = stages.untrained(loaded, cfg, accelerator)
    for part, stage in built:
        known += [g.id for g in stage.gates]
        if part.cfg.init_from:
            start = init_from.report(stage, Path(part.cfg.init_from), trust_pickle=cfg.trust_pickle)
        if "train" in stage.data and len(stage.data["train"]) < 2:
            raise UserError(
                "the training set is too small", got=f"{len(stage.data['train'])} sample(s)", needed="2 or more"
            )
    for name in names:
        if name not in known:
            raise config.unknown(f"gate '{name}'", name, known, next=f"trainworthy check {loaded.target}")
    return start


@contextlib.contextmanager
def told(loaded: recipes.Recipe) -> Iterator[None]:
    """Data that are not there, or not what they should be, are the user's to mend: an OSError or ValueError inside becomes one
    message that names the recipe's line. Anything else (TypeError, KeyError, ...) is a bug and keeps its traceback."""
    try:
        yield
    except (OSError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((f for f in reversed(frames) if f.filename == str(loaded.entry.path)), None)
        if frame is None:
            raise
        raise UserError(
            f"{loaded.id} cannot read its data or build its model", got=f"{type(error).__name__}: {error}",
            cause=f"{frame.filename}:{frame.lineno}: {frame.line}", next=f"mend it, then: trainworthy check {loaded.target}",
        ) from None  # fmt: skip


def together(accelerator: Accelerator, problem: Stop | None) -> None:
    """Raise rank 0's problem on every rank: one that stops alone leaves the others waiting."""
    problem = gates.agreed(accelerator, problem)
    if problem is not None:
        raise problem


@contextlib.contextmanager
def session_lock(session: Session) -> Iterator[None]:
    """One process group per run folder; a second one is refused."""
    with open(session.folder / ".lock", "a") as file:
        problem = None
        if session.main and fcntl is not None:
            try:  # a record lock: it belongs to this process, not to the loader's workers that outlive a kill
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                problem = UserError(f"{session.folder} is in use by another process", needed="one process at a time",
                                    cause="it was resumed twice, or is still running")  # fmt: skip
        together(session.accelerator, problem)
        yield


@contextlib.contextmanager
def reported(session: Session) -> Iterator[None]:
    """However it ends as planned, there is a page to look at."""
    try:
        yield
    except Stop:
        if session.main:
            with contextlib.suppress(OSError):  # a full disk must not hide why the run stopped
                report.write(session.folder)
        raise
    if session.main:
        report.write(session.folder)


class Interrupts:
    """SIGTERM and Ctrl-C: while a run trains they ask it to save and stop after the step; before that they end the process.
    A second Ctrl-C does not wait."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run: Run | None = None

    def __enter__(self) -> "Interrupts":
        self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame) -> None:
        name = signal.Signals(number).name
        if self.run is None or (self.run.signal and number == signal.SIGINT):
            raise Interrupted(f"{name}: not at a step boundary\n  next:         trainworthy resume {self.folder}")
        self.run.signal = name


def write_start(session: Session) -> None:
    """args.json, environment.json and the recipe's source, before anything is spent; a stage's folder has its own settings."""
    s = session
    if not s.main:
        return
    *earlier, last = stages.parts(s.recipe, s.cfg)
    for part in earlier:
        stage_folder = part.folder(s.folder)
        stage_folder.mkdir(parents=True, exist_ok=True)
        _write_args(replace(s, cfg=part.cfg), stage_folder, stage=part.name)
    own, rungs = config.to_dict(last.cfg), s.recipe.rungs
    more = {"last_stage": {k: own[k] for k in ("train", "optim")}} if earlier or rungs else {}
    _write_args(s, s.folder, **more, **({"rungs": rungs, "stage": last.name} if rungs else {}))
    (s.folder / "environment.json").write_text(json.dumps(environment.collect(s.recipe, s.accelerator), indent=1))
    shutil.copy(s.recipe.entry.path, s.folder / "recipe.py")


def _write_args(s: Session, folder: Path, **more: object) -> None:
    args = {"recipe": s.recipe.target, "preset": s.preset, "argv": s.argv, "processes": s.accelerator.num_processes,
            "settings": config.to_dict(s.cfg), "start": s.start and asdict(s.start), **more}  # fmt: skip
    # What the launcher decided holds on resume.
    args["settings"]["train"]["precision"] = precision(s.cfg, s.accelerator)
    (folder / "args.json").write_text(json.dumps(args, indent=1))
