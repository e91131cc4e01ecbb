"""`python -m core.launch [run|check|resume] ...`: the life of a run, from the command line to the report.

preflight -> data report -> build -> gates -> training, stage by stage -> evaluation -> export -> report
"""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from core import config, environment, gates, inventory, ledger
from core import recipe as recipes
from core.checkpoint import load_into, load_weights, save_weights, weights
from core.console import Console, table
from core.errors import DONE, GateFailed, Interrupted, Stop, UserError
from core.metrics import MetricsTracker
from core.run import Plan, Run, evaluating, precision
from core.stage import Stage, Tile, View

USAGE = """usage: python -m core.launch [run] RECIPE [settings]    train RECIPE (an id, or a path to a fork) behind its gates
       python -m core.launch check RECIPE [--only ID,...] [--deep] [settings]    the gates alone
       python -m core.launch resume RUN_FOLDER [--force]    go on where a run stopped"""


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

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process


def main(target: str | None = None, argv: list[str] | None = None) -> None:
    """Run the command in `argv` (default: the process's), with `target` as its recipe when a file starts itself; exits."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if target is not None:
        argv = ["run", target, *argv]
    try:
        command(argv)
        code = DONE
    except Stop as stop:
        if os.environ.get("RANK", "0") == "0":
            kind = {2: "error", 3: "stopped before training", 4: "stopped", 5: "interrupted"}[stop.exit_code]
            print(f"\n{kind}: {stop}" if kind != "error" else f"{kind}: {stop}", file=sys.stderr, flush=True)
        code = stop.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if note := os.environ.get("TRAINWORTHY_EXIT"):  # `trainworthy -n` passes our code on; launchers would make it 1
        if os.environ.get("RANK", "0") == "0":
            Path(note).write_text(str(code))
        code = DONE
    sys.exit(code)


def command(argv: list[str]) -> None:
    """Dispatch on the first word."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    verb = argv[0] if argv[:1] and argv[0] in ("run", "check", "resume") else "run"
    rest = argv[1:] if argv[:1] == [verb] else argv
    if not rest:
        raise UserError(f"{verb} what?", next=USAGE)
    {"run": run, "check": check, "resume": resume}[verb](rest)


# -------------------------------------------------------------------------------------------------------------- commands
def run(argv: list[str]) -> None:
    """Gates, then the full run."""
    loaded = recipes.load(argv[0])
    cfg, preset = config.parse(loaded.module, argv[1:], prog=f"trainworthy run {argv[0]}")
    session = open_session(loaded, cfg, preset, argv)
    with session_lock(session), Interrupts(session.folder) as interrupts, reported(session):
        write_start(session)
        prove(session, only=(), deep=False)
        train(session, interrupts)


def check(argv: list[str]) -> None:
    """The gates alone, always proved afresh."""
    rest, only = config.take(argv, "--only")
    deep = "--deep" in rest
    rest = [a for a in rest if a != "--deep"]
    loaded = recipes.load(rest[0])
    cfg, preset = config.parse(loaded.module, rest[1:], prog=f"trainworthy check {rest[0]}")
    chosen = tuple((only or "").replace(",", " ").split())
    session = open_session(loaded, cfg, preset, rest, kind="checks", only=chosen)
    with session_lock(session), Interrupts(session.folder), reported(session):
        write_start(session)
        prove(session, only=chosen, deep=deep)
    session.console.say(f"  evidence in {session.folder}/gates.json and report.html")


def resume(argv: list[str]) -> None:
    """Go on from the newest complete checkpoint of a run folder."""
    force = "--force" in argv
    folder = Path(next((a for a in argv if not a.startswith("-")), ""))
    args = folder / "args.json"
    if not args.is_file():
        raise UserError(f"{folder} is no run folder", got="no args.json in it", needed="a folder under runs/<recipe>/",
                        next="ls -d runs/*/*")  # fmt: skip
    if (folder / "summary.json").exists():
        raise UserError(f"{folder} has finished", got="a summary.json", needed="a run that was interrupted",
                        next=f"open {folder / 'report.html'}, or start a new run")  # fmt: skip
    saved = json.loads(args.read_text())
    loaded = recipes.load(saved["recipe"])
    cfg = config.read_args(args, loaded.module.Config)
    changed = environment.changed_sources(folder, loaded)
    if changed and not force:
        raise UserError("the recipe is not the one this run was started with", got="changed: " + ", ".join(changed),
                        needed="the same sources, or your word that it does not matter",
                        next=f"trainworthy resume {folder} --force")  # fmt: skip
    session = open_session(loaded, cfg, saved["preset"], saved["argv"], folder=folder)
    with session_lock(session), Interrupts(session.folder) as interrupts, reported(session):
        prove(session, only=(), deep=False)
        train(session, interrupts)


# ------------------------------------------------------------------------------------------------------- start of a run
def open_session(loaded: recipes.Recipe, cfg: config.Config, preset: str, argv: list[str], *, kind: str = "",
                 only: tuple[str, ...] = (), folder: Path | None = None) -> Session:  # fmt: skip
    """Devices, processes and the run folder; whatever can fail cheaply fails here."""
    torch.set_num_threads(cfg.run.threads or torch.get_num_threads())
    accelerator = Accelerator()
    environment.assert_processes(accelerator.num_processes)
    console = Console(quiet=not accelerator.is_main_process)
    check_settings(loaded, cfg, accelerator, (*cfg.gates.waive, *only))
    if folder is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = cfg.run.out / loaded.slug / kind / f"{stamp}-{secrets.token_hex(2)}"
        box = [str(folder)]
        if accelerator.num_processes > 1:
            dist.broadcast_object_list(box, src=0)
        folder = Path(box[0])
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
        except OSError as error:
            raise UserError(f"the run folder {folder} cannot be written", got=error.strerror,
                            next="choose another place with --run.out FOLDER") from None  # fmt: skip
    if accelerator.num_processes > 1:
        accelerator.wait_for_everyone()
    devices = (
        f"{accelerator.num_processes} x {accelerator.device.type}"
        if accelerator.num_processes > 1
        else str(accelerator.device)
    )
    console.say(f"{loaded.id} · {preset} · seed {cfg.run.seed} · {devices} · {precision(cfg, accelerator)}")
    return Session(loaded, cfg, preset, accelerator, console, folder, argv)


def check_settings(
    loaded: recipes.Recipe, cfg: config.Config, accelerator: Accelerator, names: tuple[str, ...]
) -> None:
    """Values that cannot work and gates that nobody knows, told before a folder is made."""
    config.check_values(cfg, processes=accelerator.num_processes)
    known = [g.id for g in gates.ORDER]
    for make_stage in loaded.module.STAGES:
        stage = gates.build(Run(cfg, accelerator, plan=Plan(steps=1)), lambda run, m=make_stage: m(cfg, run))
        known += [g.id for g in stage.gates]
        if len(stage.data["train"]) < 2:
            raise UserError(
                "the training set is too small", got=f"{len(stage.data['train'])} sample(s)", needed="2 or more"
            )
    for name in names:
        if name not in known:
            raise config.unknown(f"gate '{name}'", name, known, next=f"trainworthy check {loaded.target}")


@contextlib.contextmanager
def session_lock(session: Session) -> Iterator[None]:
    """One process group per run folder; a second one is refused."""
    if not session.main:
        yield
        return
    with open(session.folder / ".lock", "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks on this system
        except OSError:
            raise UserError(f"{session.folder} is in use by another process", needed="one process at a time",
                            cause="it was resumed twice, or is still running") from None  # fmt: skip
        yield


@contextlib.contextmanager
def reported(session: Session) -> Iterator[None]:
    """However it ends as planned, there is a page to look at."""
    from core import report

    try:
        yield
    except Stop:
        if session.main:
            report.write(session.folder)
        raise
    if session.main:
        report.write(session.folder)


def write_start(session: Session) -> None:
    """args.json, environment.json and the recipe's source, before anything is spent."""
    if not session.main:
        return
    s = session
    args = {"recipe": s.recipe.target, "preset": s.preset, "argv": s.argv, "processes": s.accelerator.num_processes,
            "settings": config.to_dict(s.cfg)}  # fmt: skip
    (s.folder / "args.json").write_text(json.dumps(args, indent=1))
    (s.folder / "environment.json").write_text(json.dumps(environment.collect(s.recipe, s.accelerator), indent=1))
    shutil.copy(s.recipe.entry.path, s.folder / "recipe.py")


# ------------------------------------------------------------------------------------------------------------- proving
def prove(session: Session, *, only: tuple[str, ...], deep: bool) -> None:
    """The data report, then every gate; raises GateFailed before the budget is spent."""
    s, cfg = session, session.cfg
    chosen = [g for g in gates.ORDER if not only or g.id in only]
    for make_stage in s.recipe.module.STAGES:
        maker = lambda run, make_stage=make_stage: make_stage(cfg, run)  # noqa: E731
        probe = Run(cfg, s.accelerator, plan=Plan(steps=1))
        stage = gates.build(probe, maker)
        scans = {name: inventory.scan(name, data, everything=deep) for name, data in stage.data.items()}
        report = inventory.report(scans)
        if s.main:
            (s.folder / "data.json").write_text(json.dumps(report, indent=1))
        counts = " / ".join(f"{x.total:,} {name}" for name, x in scans.items())
        stage_gates = [*chosen, *([g for g in stage.gates if not only or g.id in only])]
        if not cfg.gates.enabled and not only:
            s.console.say(f"data   {counts}\ngates  OFF (--gates.no-enabled): nothing is proved", style="yellow")
            if s.main:
                gates.write(s.folder / "gates.json", [], enabled=False)
            continue
        mark = recipes.fingerprint(s.recipe, cfg, report["fingerprint"], processes=s.accelerator.num_processes, stage=stage.name,
                                   device=str(s.accelerator.device.type), precision=precision(cfg, s.accelerator))  # fmt: skip
        use_ledger = cfg.gates.remember and "checks" not in s.folder.parts
        known = ledger.read(mark) if use_ledger else {}
        s.console.say(f"data   {counts}\ngates  before the budget is spent")
        half = os.environ.get("TRAINWORTHY_HALF")
        argv = [s.recipe.target, *s.argv[1:]]  # a fork by its full path: a repro runs from anywhere
        proof = gates.Proof(cfg, s.accelerator, maker, s.recipe.module.train, s.folder, scans, report, argv, deep,
                            Path(half) if half else None)  # fmt: skip
        verdicts = gates.run_gates(stage_gates, proof, known=known, console=s.console)
        failed = [v for v in verdicts if v.blocks]
        if s.main:
            gates.write(s.folder / "gates.json", verdicts, enabled=True, fingerprint=mark)
            if not failed and not only:
                ledger.write(mark, verdicts)
        passed, skipped = (sum(v.verdict == k for v in verdicts) for k in ("pass", "skip"))
        waived = sum(v.verdict == "waived" for v in verdicts)
        extra = "".join(f", {n} {word}" for n, word in ((skipped, "skipped"), (waived, "waived")) if n)
        seconds = sum(v.seconds for v in verdicts)
        if failed:
            first = failed[0]
            raise GateFailed(
                f"{len(failed)} of {len(verdicts)} gates failed, first: {first.id} ({first.rows})\n"
                f"  evidence:     {s.folder / 'report.html'} and {s.folder / 'gates' / first.id}/\n"
                f"  try again:    {shlex.join(['trainworthy', 'check', *s.argv, '--only', first.id])}"
            )
        if not all(v.remembered for v in verdicts):
            s.console.say(f"       {passed} of {len(verdicts)} gates passed{extra}, {seconds:.1f} s")


# ------------------------------------------------------------------------------------------------------------- training
def train(session: Session, interrupts: "Interrupts") -> None:
    """Every stage from its seed or its newest checkpoint; then evaluation, export, report."""
    s, cfg = session, session.cfg
    previous: Stage | None = None
    for make_stage in s.recipe.module.STAGES:
        tracker = MetricsTracker(s.folder, use_tensorboard=cfg.run.tensorboard) if s.main else None
        one = Run(cfg, s.accelerator, folder=s.folder, tracker=tracker, console=s.console)
        stage = gates.build(one, lambda run, m=make_stage, p=previous: m(cfg, run, p))
        steps = one.total_steps(stage)
        s.console.say(
            f"train  {steps:,} steps of {cfg.train.batch_size} samples, {cfg.train.epochs:g} epochs, into {s.folder}"
        )
        watcher = Watcher(one, stage)
        one.after_eval = watcher.look
        watcher.before()
        interrupts.run = one
        s.recipe.module.train(cfg, one, stage)
        interrupts.run = None
        one.console.end_bar()
        one.checkpoints.wait()
        previous = stage
    result = finish(s, one, stage)
    one.close()
    if s.main:
        s.console.say(
            f"\nresult {stage.metric.question}  ({cfg.run.export} weights, {len(stage.data['val']):,} held-out samples)"
        )
        s.console.say(table(result["table"]))
        s.console.say(
            f"\nreport {s.folder / 'report.html'}\ncard   {s.folder / 'card.md'}\nexport {s.folder / 'export'}"
        )


class Watcher:
    """Pictures of what the net sees, and its predictions on one fixed batch over time."""

    def __init__(self, run: Run, stage: Stage, n: int = 16):
        self.run, self.stage = run, stage
        val = stage.data["val"]
        self.path = run.folder / "previews"
        seed = run.cfg.run.seed
        self.batch = gates.fetch(val, gates.pick(val, min(n, len(val)), seed), None, run.device)
        train = stage.data["train"]
        self.seen = gates.fetch(train, gates.pick(train, min(2 * n, len(train)), seed), seed, run.device)

    def before(self) -> None:
        """What the net sees just before the net: training path and evaluation path."""
        from core.pictures import contact_sheet, png

        if self.run.rank or not self.stage.preview:
            return
        for name, batch in (("train", self.seen), ("val", self.batch)):
            tiles = self.stage.preview({k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
            contact_sheet(tiles, self.path / f"inputs_{name}.png")
            folder = self.path / name
            folder.mkdir(parents=True, exist_ok=True)
            for i, tile in enumerate(tiles):
                if tile.image is not None:
                    (folder / f"{i:02d}.png").write_bytes(png(tile.image))
            (folder / "captions.json").write_text(json.dumps([t.caption for t in tiles]))

    def look(self, step: int) -> None:
        """Predictions on the fixed batch, one row per evaluation; a resumed run writes its rows again."""
        if self.run.rank or not self.stage.predict:
            return
        with evaluating(self.stage.model), self.run.autocast():
            tiles: list[Tile] = self.stage.predict(self.stage.model, self.batch)
        path = self.path / "predictions.jsonl"
        rows = [r for r in path.read_text().splitlines() if json.loads(r)["step"] < step] if path.exists() else []
        rows.append(json.dumps({"step": step, "captions": [t.caption for t in tiles], "good": [t.good for t in tiles]}))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(rows) + "\n")


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


def finish(s: Session, run: Run, stage: Stage) -> dict[str, Any]:
    """Final evaluation against the baselines, figures, export, summary.json and card.md."""
    metric, cfg = stage.metric, s.cfg
    best_value, best_step = run.best[0]
    final = {k.removeprefix("val/"): v for k, v in run.history[-1].items() if k.startswith("val/")}
    chosen_step = run.history[-1]["step"]
    if cfg.run.export == "best":
        folder = run.checkpoints.folder / f"best_val_{metric.name}"
        load_into(stage.model, load_weights(folder / "model.safetensors"), where=str(folder))
        final, chosen_step = run.measure(stage, stage.data["val"]), best_step
    inputs = tuple(k for k, f in stage.data["val"].fields.items() if f.role == "input")
    val = stage.data["val"]
    zeroed = run.measure(stage, View(val, range(len(val)), blank=inputs))
    shown: dict[str, Any] = {}
    if stage.figures:
        with evaluating(stage.model), run.autocast():
            shown = stage.figures(stage.model, val)
    if not s.main:
        return {}
    baselines = {**stage.baselines(), "this model, input zeroed": {metric.name: zeroed[metric.name]}}
    export = s.folder / "export"
    export.mkdir(exist_ok=True)
    stage.export(export) if stage.export else save_weights(export / "model.safetensors", *weights(stage.model))
    summary = {
        "recipe": s.recipe.id, "stage": stage.name, "question": metric.question,
        "metric": metric.name, "higher_is_better": metric.higher_is_better,
        "floor": metric.floor, "ceiling": metric.ceiling, "best_known": metric.best_known,
        "reported": {"weights": cfg.run.export, "step": chosen_step, metric.name: final[metric.name]},
        "final": run.history[-1], "best": {"step": best_step, metric.name: best_value},
        "n_best": [{"step": st, metric.name: v} for v, st in run.best],
        "metrics": final, "baselines": baselines, "seeds": [cfg.run.seed],
        "steps": run.step, "epochs": cfg.train.epochs, "train_seconds": round(run.seconds, 1), "skipped_steps": run.skipped,
        "parameters": sum(p.numel() for p in stage.model.parameters()),
        "trained_parameters": sum(p.numel() for p in stage.parameters().values()),
        "parameters_per_sample": round(sum(p.numel() for p in stage.parameters().values()) / len(stage.data["train"]), 2),
        "figures": {k: _plain_figure(v) for k, v in shown.items()},
    }  # fmt: skip
    (s.folder / "summary.json").write_text(json.dumps(summary, indent=1, default=str))
    from core.card import write_card

    write_card(s.folder)
    rows = [("", metric.name), (f"{s.recipe.id}, step {chosen_step}", f"{final[metric.name]:.4f}")]
    rows += [(name, f"{m[metric.name]:.4f}") for name, m in baselines.items() if metric.name in m]
    return {"table": rows}


def _plain_figure(figure: Any) -> Any:
    """What summary.json can hold of a figure."""
    if isinstance(figure, list):
        return [{**asdict(t), "image": None if t.image is None else t.image.tolist()} for t in figure]
    plain = asdict(figure)
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in plain.items()}


if __name__ == "__main__":
    main()
