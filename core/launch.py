"""`python -m trainworthy.launch [run|check|resume] ...`: one run, from the command line to the report.

settings -> data report -> gates -> training -> evaluation -> export -> report
"""

import contextlib
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from trainworthy.core import gates
from trainworthy.core.base import config, masking
from trainworthy.core.base.console import outlast_readers, table
from trainworthy.core.base.errors import DONE, GateFailed, Stop, UserError
from trainworthy.core.base.processes import agreed
from trainworthy.core.commands.check import seeds
from trainworthy.core.commands.help import RUN_OPTIONS
from trainworthy.core.data import contents, inventory
from trainworthy.core.gates import order
from trainworthy.core.gates.exported import WrongExport
from trainworthy.core.loop import shard
from trainworthy.core.loop.checkpoint import assert_resumable, digest, load_into, load_weights
from trainworthy.core.loop.run import Run, precision
from trainworthy.core.monitoring import board, cost, monitors
from trainworthy.core.monitoring.metrics import MetricsTracker
from trainworthy.core.monitoring.trackers import mirror, tracked
from trainworthy.core.recipe import loading as recipes
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.report import bands
from trainworthy.core.session import environment, ledger, multi_seed, nodes, on_end, process_end, rungs, stages
from trainworthy.core.session.results import ClassWatch, Watcher, finish
from trainworthy.core.session.session import (
    Interrupts,
    Session,
    open_session,
    reported,
    session_lock,
    together,
    told,
    write_start,
)

BESIDE = (
    "data",
    "batch",
    "profile",
    "predict",
    "chat",
)  # commands that need torch and have their own module, core/commands/<verb>.py
USAGE = """usage: trainworthy run RECIPE [--seeds N] [settings]    train RECIPE (id, or path of a fork) behind its gates
       trainworthy check RECIPE [--seeds N] [--only ID,...] [--stage NAME] [--deep] [settings]    the gates alone
       trainworthy lr RECIPE [--steps 200] [settings]    which peak rate? a range test
       trainworthy resume RUN_FOLDER [--force]    go on where a run stopped
       trainworthy resume RUN_FOLDER --rung NAME [--force] [settings]    go on from its weights: a rung of its recipe
       trainworthy data RECIPE [--sample N] [--json] [settings]    what is in its data
       trainworthy batch RECIPE [--largest N] [--memory 0.5] [settings]    how many samples at once"""


def main(target: str | None = None, argv: list[str] | None = None) -> None:
    """Run the command in `argv` (default: the process's), with `target` as its recipe if a file starts itself; then
    exit."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if target is not None:
        argv = ["run", target, *argv]
    outlast_readers()
    process_end.leave(*outcome(argv), then=on_end.run)


def outcome(argv: list[str]) -> tuple[int, str, bool]:
    """Run `argv`; return (exit code, message, whether it stopped as planned and not by a bug)."""
    try:
        command(nodes.continued(on_end.take(argv)))
    except process_end.Crashed as crash:
        return crash.exit_code, f"{crash.trace}\n{'crashed' if crash.trace else 'stopped'}: {crash}", not crash.trace
    except Stop as stop:
        kind, told = process_end.KINDS.get(stop.exit_code, "interrupted"), masking.hide(str(stop))
        return stop.exit_code, f"\n{kind}: {told}" if kind != "error" else f"{kind}: {told}", True
    except SystemExit as asked:  # the parser exits: help, a wrong type
        return int(asked.code or DONE), "", True
    except Exception as error:  # an error before there is a run folder
        return process_end.before_run(error)
    return DONE, "", True


def command(argv: list[str]) -> None:
    """Dispatch on the first word."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    from trainworthy.core.commands.lr import lr

    own = {"run": run, "check": check, "resume": resume, "lr": lr}
    verb = argv[0] if argv[:1] and argv[0] in (*own, *BESIDE) else "run"
    rest = argv[1:] if argv[:1] == [verb] else argv
    if not rest and verb not in BESIDE:
        raise UserError(f"{verb} what?", needed="a run folder" if verb == "resume" else "a recipe: an id, or the path of a fork",
                        next=f"trainworthy {verb} --help")  # fmt: skip
    if verb in BESIDE:
        import_module(f"trainworthy.core.commands.{verb}").main(argv)
    else:
        own[verb](rest)


# -------------------------------------------------------------------------------------------------------------- commands
def run(argv: list[str]) -> None:
    """Run the gates, then the full run."""
    wanted, argv = "--board" in argv, [a for a in argv if a != "--board"]
    argv, asked = config.take(argv, "--seeds")
    if asked is not None:
        multi_seed.run(argv, asked, with_board=wanted)
    if not argv:
        raise UserError("run what?", next=USAGE)
    loaded = recipes.load(argv[0])
    cfg, preset = config.parse(loaded.module, argv[1:], prog=f"trainworthy run {argv[0]}", options=RUN_OPTIONS)
    assert_boardable(cfg, wanted)
    folder = os.environ.pop("TRAINWORTHY_FOLDER", None)  # set for one of several seeds
    session = open_session(loaded, cfg, preset, argv, folder=Path(folder) if folder else None)
    track = tracked(session.accelerator, cfg, session.folder, project=loaded.slug)
    shown = board.beside(cfg.run.out, wanted=wanted and session.main, say=session.console.say)
    with (
        session_lock(session),
        Interrupts(session.folder) as interrupts,
        reported(session),
        track,
        shown as board_is_up,
    ):
        write_start(session)
        prove(session, only=(), deep=False)
        board_is_up()
        train(session, interrupts)


def assert_boardable(cfg: config.Config, wanted: bool) -> None:
    """Raise UserError if --board has nothing to show."""
    if wanted:
        board.assert_installed()
        if not cfg.run.tensorboard:
            raise UserError("--board shows TensorBoard's files", got="--run.no-tensorboard", needed="one of them")


def check(argv: list[str]) -> None:
    """Run the gates only, without remembered verdicts."""
    argv, asked = config.take(argv, "--seeds")
    if asked is not None:
        seeds(argv, asked)
    rest, only = config.take(argv, "--only")
    rest, stage = config.take(rest, "--stage")
    deep = "--deep" in rest
    rest = [a for a in rest if a != "--deep"]
    if not rest:
        raise UserError("check what?", needed="a recipe: an id, or the path of a fork", next="trainworthy check --help")
    loaded = recipes.load(rest[0])
    cfg, preset = config.parse(loaded.module, rest[1:], prog=f"trainworthy check {rest[0]}")
    chosen = tuple((only or "").replace(",", " ").split())
    folder = os.environ.pop("TRAINWORTHY_FOLDER", None)
    session = open_session(
        loaded, cfg, preset, rest, kind="checks", only=chosen, folder=Path(folder) if folder else None
    )
    again = shlex.join(["trainworthy", "check", *argv])
    with session_lock(session), Interrupts(session.folder, next=again), reported(session):
        write_start(session)
        prove(session, only=chosen, deep=deep, stage=stage or "")
    session.console.say(f"  evidence in {session.folder}/gates.json and report.html")


def resume(argv: list[str]) -> None:
    """Continue from the newest complete checkpoint of a run folder; with `--rung`, train that stage of its recipe from
    its weights."""
    force, wanted = "--force" in argv, "--board" in argv
    rest, rung = config.take([a for a in argv if a not in ("--force", "--board")], "--rung")
    if not rest:
        raise UserError("resume what?", needed="a run folder", next="ls -d runs/*/*")
    folder, secrets = Path(rest[0]), masking.given(rest[1:]) if rung is None else {}
    if (folder / multi_seed.NAME).is_file() and rung is None:
        multi_seed.resume(folder, force=force, given=secrets, with_board=wanted)
    saved = begun(folder)
    if (folder / "summary.json").exists() and rung is None:
        raise UserError(f"{folder} has finished", got="a summary.json", needed="a run that was interrupted",
                        next=f"open {folder / 'report.html'}, or start a new run")  # fmt: skip
    plain = recipes.load(saved["recipe"])
    cfg, names = config.read_args(folder / "args.json", plain.module.Config), saved.get("rungs", [])
    command = f"trainworthy resume {folder}" + (f" --rung {rung}" if rung else "")
    if rung is None:
        own = config.to_dict(getattr(plain.module, saved["preset"])())
        secrets = masking.defaults(own, saved["argv"]) | secrets
        cfg = config.complete(cfg, where=str(folder / "args.json"), command=command, secrets=secrets)
    changed = environment.changed_sources(folder, plain)
    if changed and not force:
        raise UserError("the recipe is not the one this run was started with", got="changed: " + ", ".join(changed),
                        needed="the same sources, or --force if the change does not matter",
                        next=f"{command} --force")  # fmt: skip
    loaded, words = rungs.recipe_of(plain, names, rungs.start_files(folder)) if names else plain, saved["argv"]
    if rung is not None:
        rungs.recipe_of(plain, [*names, rung], [])  # reports an unknown rung before it looks for weights
        files = [*rungs.start_files(folder), rungs.final_weights(folder, loaded, cfg)]
        loaded, words = rungs.recipe_of(plain, [*names, rung], files), [plain.target, *rest[1:]]
        cfg, _ = config.parse(loaded.module, ["--config", str(folder / "args.json"), *rest[1:]], prog=command)
        cfg.init_from = None
    session = open_session(loaded, cfg, saved["preset"], words, folder=folder if rung is None else None)
    session.resumes = "" if rung is not None else "forced" if force else "as it was"
    assert_boardable(cfg, wanted)
    shown = board.beside(session.folder.parent.parent, wanted=wanted and session.main, say=session.console.say)
    track = tracked(session.accelerator, cfg, session.folder, project=loaded.slug)
    with (
        session_lock(session),
        resumable(session),
        Interrupts(session.folder) as interrupts,
        reported(session),
        track,
        shown as board_is_up,
    ):
        if rung is not None:
            write_start(session)
            rungs.copy_start_files(session, files)
        prove(session, only=(), deep=False)
        board_is_up()
        train(session, interrupts)


@contextlib.contextmanager
def resumable(session: Session) -> Iterator[None]:
    """Check, before anything changes, that a continued run has a complete checkpoint of its own."""
    problem = None
    if session.main and session.resumes:
        try:
            assert_resumable(session.folder, session.identity)
        except UserError as error:
            problem = error
    together(session.accelerator, problem)
    yield


def begun(folder: Path) -> dict[str, Any]:
    """Return args.json of a run folder."""
    args = folder / "args.json"
    if folder.resolve().parent.name == "stages":
        raise UserError(f"{folder} is one stage of a run", needed="the run's folder",
                        next=f"trainworthy resume {folder.parent.parent}")  # fmt: skip
    if not args.is_file() or folder.resolve().parent.name == "checks":
        raise UserError(f"{folder} is not a run folder", got="no args.json in it", needed="a folder under runs/<recipe>/",
                        next="ls -d runs/*/*")  # fmt: skip
    try:
        saved = json.loads(args.read_text())
        return {**saved, **{k: saved[k] for k in ("recipe", "preset", "argv")}}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{args} cannot be read", got=f"{type(error).__name__}: {error}", needed="the file this run began with",
                        cause="it was edited, or the run was killed while it began", next="start a new run") from None  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- gates
def prove(session: Session, *, only: tuple[str, ...], deep: bool, stage: str = "") -> None:
    """Write every stage's data report and run its gates, in order. A later stage starts from the one before, as its
    gates trained it on eight samples. Raises GateFailed before the full run. `stage`: only that one."""
    with gates.quick_collections():
        _prove_each(session, only, deep, stage)
    if stage and stage not in (known := [p.name for p in stages.parts(session.recipe, session.cfg)]):
        raise config.unknown(f"stage '{stage}'", stage, known)


def _prove_each(session: Session, only: tuple[str, ...], deep: bool, stage: str) -> None:
    for part, proof in stages.proofs(session, deep=deep):
        if stage in ("", part.name):
            prove_stage(session, part, proof, only)


def prove_stage(
    session: Session, part: stages.Part, proof: gates.GateContext, only: tuple[str, ...], mark: str = ""
) -> None:
    """Write the data report of one stage, then run its gates. `mark` separates different starts with equal settings."""
    s, cfg = session, part.cfg
    _, stage = proof.look()
    code = recipes.sources(s.recipe)
    about = {"processes": s.accelerator.num_processes, "stage": part.name, "start": s.start and s.start.sha256, "before": mark,
             "device": str(s.accelerator.device.type), "precision": precision(cfg, s.accelerator)}  # fmt: skip
    sharded = shard.mode(cfg, s.accelerator.num_processes) != shard.NONE
    about |= {"shard": cfg.run.shard} if sharded else {}
    base = recipes.fingerprint(s.recipe, cfg, "", **about)
    report_data(s, proof, stage, base)
    counts = " / ".join(f"{x.total:,} {name}" for name, x in proof.scans.items())
    counts += "".join(f"\n       {k}: {v}" for x in proof.scans.values() for k, v in x.notes.items())
    title = f"\nstage  {part.name}, {part.index + 1} of {part.of}\n" if part.of > 1 else ""
    chosen = [g for g in order.of_stage(stage, sharded=sharded) if not only or g.id in only]
    if not cfg.gates.enabled and not only:
        s.console.say(f"{title}data   {counts}\ngates  OFF (--gates.no-enabled): nothing is checked", style="yellow")
        if copies := proof.data_report.get("overlap", {}).get("exact"):
            s.console.say(f"       {copies:,} validation samples are copies of training samples", style="yellow")
        if s.main:
            keep(s, part, [], enabled=False)
        return
    everything_read = json.dumps([inventory.identity(proof.scans), [x.digests for x in proof.scans.values()]])
    mark = recipes.fingerprint(s.recipe, cfg, everything_read, **about)
    use_ledger = cfg.gates.remember and s.folder.parent.name != "checks"
    known, late = ledger.read(mark) if use_ledger else ({}, {})
    known = known if recipes.unchanged(s.recipe, late) else {}
    mark, known = agreed(s.accelerator, (mark, known))
    from_it = {"none": "", "rehearsed": ", from the stage before as eight samples trained it"}
    s.console.say(
        f"{title}data   {counts}\ngates  before the budget is spent"
        + from_it.get(proof.follows, ", from the stage before as it is now")
        + "\n       on the whole model in each process; the gate `sharding` compares the sharded one with it, and `resume` saves "
        "its shards" * sharded
    )
    verdicts = gates.run_gates(chosen, proof, known=known, console=s.console)
    s.accelerator.free_memory()  # accelerate keeps every model that it wrapped
    failed = [v for v in verdicts if v.blocks]
    if s.main:
        keep(s, part, verdicts, enabled=True, fingerprint=mark)
        late = (late if known else {}) | recipes.late(s.recipe, code)
        environment.note_sources(s.folder, s.recipe, late)
        if not failed and not only:
            ledger.write(mark, verdicts, late)
            if not proof.deep:
                ledger.keep_extent(base, inventory.identity(proof.scans))
    passed, skipped = (sum(v.verdict == k for v in verdicts) for k in ("pass", "skip"))
    waived = sum(v.verdict == "waived" for v in verdicts)
    extra = "".join(f", {n} {word}" for n, word in ((skipped, "skipped"), (waived, "waived")) if n)
    seconds = sum(v.seconds for v in verdicts)
    if failed:
        first = failed[0]
        explained = f", explained by {first.evidence['explained_by']}" if "explained_by" in first.evidence else ""
        proved = ["check", *s.argv, *proof.argv[len(s.argv) :], "--only", first.id]
        again = ["trainworthy", *(["resume", str(s.folder)] if s.recipe.rungs else masking.words(proved))]
        raise GateFailed(
            f"{len(failed)} of {len(verdicts)} gates failed, first: {first.id} ({first.rows}){explained}\n"
            f"  evidence:     {s.folder / 'report.html'} and {proof.folder / 'gates' / first.id}/\n"
            f"  try again:    {shlex.join(again)}"
        )
    if not all(v.remembered for one, v in zip(chosen, verdicts, strict=True) if one.lasting):
        s.console.say(f"       {passed} of {len(verdicts)} gates passed{extra}, {seconds:.1f} s")


def report_data(s: Session, proof: gates.GateContext, stage: Stage, base: str) -> None:
    """Scan the data into `proof` and data.json. A continued run reads as much as at its start, and the data must be the
    same. Otherwise it reads as much as the last time under `base`, the fingerprint without data."""
    path, before = proof.folder / "data.json", {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        before = json.loads(path.read_text())["identity"]
    then = before.get(proof.follows, {}) if s.resumes else {}
    extent = {} if proof.deep else agreed(s.accelerator, then or ledger.extent(base))
    with told(s.recipe, s.cfg):
        proof.scans = inventory.read_all(stage.data, everything=proof.deep, before=extent)
    now = inventory.identity(proof.scans)
    changed = contents.changes(then, now) if then else []
    forced = s.resumes == "forced"
    refused = None if not changed or forced else UserError(
        "the data are not those this run was started with", got="; ".join(changed), needed="the same data, or your word that it "
        "does not matter", cause=f"files of the data were changed, added or removed since {path} was written",
        next=f"trainworthy resume {s.folder} --force")  # fmt: skip
    together(s.accelerator, refused)
    if changed:
        s.console.say(f"data changed since the run began; it continues (--force): {'; '.join(changed)}", style="yellow")
    proof.data_report = inventory.report(proof.scans)
    for scan in proof.scans.values():  # compared, and not read again
        scan.contents = scan.columns = None
    if s.main:
        path.write_text(json.dumps(proof.data_report | {"identity": before | {proof.follows: now}}, indent=1))


def keep(s: Session, part: stages.Part, verdicts: list[gates.Verdict], **more: Any) -> None:
    """Write gates.json: the stage's to its folder, all stages' to the run folder."""
    for folder in {part.folder(s.folder), s.folder}:
        gates.write(folder / "gates.json", verdicts, stage=part.name, **more)


# ------------------------------------------------------------------------------------------------------------- training
def train(session: Session, interrupts: Interrupts) -> None:
    """Train every stage from its seed or its newest checkpoint; then evaluate, export and report."""
    previous: Stage | None = None
    done = 0
    for part in stages.parts(session.recipe, session.cfg):
        if previous is not None:

            def trained(stage: Stage = previous) -> Stage:
                return stage

            mark = digest(previous.eval_model.state_dict())
            with gates.quick_collections():  # no variable holds the proof: its stages would live while this one trains
                prove_stage(
                    session, part, stages.proof(session, part, trained, follows="trained", deep=False), (), mark=mark
                )
        previous, done = train_stage(session, part, previous, done, interrupts)


def train_stage(
    session: Session, part: stages.Part, previous: Stage | None, done: int, interrupts: Interrupts
) -> tuple[Stage, int]:
    """Train one stage to its end; return (the stage with the weights that it passes on, steps of all stages so far).
    `done`: steps of earlier stages."""
    cfg, folder = part.cfg, part.folder(session.folder)
    s = replace(session, cfg=cfg, folder=folder)
    log = mirror(s.accelerator, s.console)
    also = None if log is None else lambda row, step: log(row, done + step)  # one step axis over all stages
    tracker = MetricsTracker(folder, use_tensorboard=cfg.run.tensorboard, also=also) if s.main else None
    one = Run(cfg, s.accelerator, folder=folder, home=session.folder, tracker=tracker, console=s.console)
    one.identity = session.identity
    stage = part.build(one, previous)
    steps = one.total_steps(stage)
    named = f"{part.name}: " if part.of > 1 else ""
    data = stage.data.get("train")
    read = cfg.train.epochs
    if data is not None and cfg.train.max_steps:
        read = min(read, steps * cfg.train.batch_size / len(data))
    what = f"steps of {cfg.train.batch_size} samples, {read:.4g} epochs" if data is not None else (
        f"iterations that collect their own samples, {cfg.train.batch_size} to an update")  # fmt: skip
    s.console.say(f"train  {named}{steps:,} {what}, into {folder}")
    watcher = Watcher(one, stage)
    classes = ClassWatch(one, stage)

    def after_eval(step: int) -> None:
        watcher.look(step)
        classes.look()
        if s.meter:
            s.meter.note()

    one.after_eval = after_eval
    watcher.before()
    if folder == session.folder:
        one.journal.healthy = bands.watch(folder, stage.metric)
    if s.main:  # what a run that never ends is judged by
        ends = {"floor": stage.metric.floor, "ceiling": stage.metric.ceiling}
        told = {
            "metric": stage.metric.name,
            "higher_is_better": stage.metric.higher_is_better,
            "question": stage.metric.question,
        }
        told |= {k: v if v is not None and math.isfinite(v) else None for k, v in ends.items()}
        (folder / "metric.json").write_text(json.dumps(told, indent=1))
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
        one.current.batches = []  # the stage knows its run: a later stage would train beside the last batch
    one.used_batches = []
    one.console.end_bar()
    one.wait_for_checkpoints()
    ended = part.last or not (folder / "summary.json").exists()  # a resumed run has looked back at its earlier stages

    def whole() -> Stage:
        """The same stage with whole weights, for the report and the export."""
        if one.shard == shard.NONE:
            return stage
        alone = replace(cfg, run=replace(cfg.run, shard="none"))
        plain = Run(alone, s.accelerator, folder=folder, console=s.console)
        return shard.gathered_stage(stage, part.build(plain, previous))

    result = finish(s, one, stage, whole) if agreed(s.accelerator, ended) else {}
    if not part.last and config.phases(cfg)[part.name].hand_on == "best":
        assert one.checkpoints  # its loop made them
        best = one.checkpoints.folder / f"best_val_{stage.metric.name}"
        load_into(stage.eval_model, load_weights(best / "model.safetensors"), where=str(best), without=stage.not_saved)
    one.close()
    one.after_eval = None  # it holds the watcher's samples
    if s.main and result:
        if result["outside"]:
            s.console.say(f"\nOUTSIDE the healthy band: {result['outside']}", style="bold red")
        if result["warning"]:
            s.console.say(f"\n{result['warning']}", style="bold red")
        s.console.say(
            f"\nresult {stage.metric.question}  ({cfg.run.export} weights, {len(stage.data['val']):,} held-out samples"
            + (")" if cfg.gates.enabled else "; gates OFF)")
        )
        s.console.say(table(result["table"]))
        if s.meter:
            s.meter.note(now=True)
        s.console.say(f"\ncost   {cost.words(cost.of_run(session.folder))}")
    if s.main and part.last:
        s.console.say(
            f"\nreport {s.folder / 'report.html'}\ncard   {s.folder / 'card.md'}\nexport {s.folder / 'export'}"
        )
    if wrong := agreed(s.accelerator, result.get("wrong")):
        raise WrongExport(f"the export in {s.folder / 'export'} is not what was scored: {wrong[0].measured}\n"
                          f"  needed:       {wrong[0].needed}\n  likely cause: {wrong[0].remedy.splitlines()[0]}\n"
                          f"  next:         mend export(), then start a new run; weights: {s.folder / 'checkpoints'}")  # fmt: skip
    return stage, done + one.step


if __name__ == "__main__":
    main()
