"""Runs the gates of every stage: the data report, remembered verdicts, the gates themselves, and the files about them."""

import json
import shlex
import time
from dataclasses import asdict
from typing import Any

from trainworthy.core import gates
from trainworthy.core.base import config, masking
from trainworthy.core.base.errors import GateFailed, UserError
from trainworthy.core.base.files import read_json, write_whole
from trainworthy.core.base.processes import agreed, kind_of, launcher_words
from trainworthy.core.base.verdict import closing, leading
from trainworthy.core.data import contents, inventory, neighbours, parts, plain_pictures, turned
from trainworthy.core.gates import order
from trainworthy.core.gates.claims import Claims
from trainworthy.core.loop import shard
from trainworthy.core.loop.precision import precision
from trainworthy.core.loop.weights import sketch
from trainworthy.core.recipe import loading as recipes
from trainworthy.core.recipe.stage import Stage
from trainworthy.core.session import environment, gate_cache, gate_processes, stages
from trainworthy.core.session.session import Session, explain_data_errors, together


def check_stages(session: Session, *, only: tuple[str, ...], deep: bool, stage: str = "") -> None:
    """Write every stage's data report and run its gates, in order. A later stage starts from the one before, as its
    gates trained it on eight samples. Raises GateFailed before the full run. `stage`: only that one."""
    words = [w for flag, value in (("--only", ",".join(only)), ("--stage", stage)) if value for w in (flag, value)]
    with gate_processes.shared(session, words + ["--deep"] * deep) as claims, gates.quick_collections():
        for spec, context in stages.contexts(session, deep=deep):
            if stage in ("", spec.name):
                check_stage(
                    session, spec, context, only, claims=gate_processes.of_stage(claims, spec.name, context.folder)
                )
            del context  # its stages would live while the next one is made
    if stage and stage not in (known := [p.name for p in stages.specs(session.recipe, session.cfg)]):
        raise config.unknown(f"stage '{stage}'", stage, known)


def check_stage(
    session: Session, spec: stages.StageSpec, context: gates.GateContext, only: tuple[str, ...], mark: str = "",
    claims: Claims | None = None,
) -> None:  # fmt: skip
    """Write the data report of one stage, then run its gates. `mark` separates different starts with equal settings. `claims`: other
    processes run gates, too; a helper runs those that it gets, and its verdicts are in its claims."""
    s, cfg = session, spec.cfg
    _, stage = context.look()
    code = recipes.sources(s.recipe)
    about = {"processes": s.accelerator.num_processes, "stage": spec.name, "start": s.start and s.start.sha256, "before": mark,
             "device": kind_of(s.accelerator.device), "precision": precision(cfg, s.accelerator)}  # fmt: skip
    sharded = shard.mode(cfg, s.accelerator.num_processes) != shard.NONE
    about |= {"shard": cfg.run.shard} if sharded else {}
    base = recipes.fingerprint(s.recipe, cfg, "", **about)
    report_data(s, context, stage, base)
    notes = inventory.merge_notes({k: x.notes for k, x in context.scans.items()})
    counts = " / ".join(f"{x.total:,} {name}" for name, x in context.scans.items())
    counts += "".join(f"\n       {note}" for note in notes)
    title = f"\nstage  {spec.name}, {spec.index + 1} of {spec.of}\n" if spec.of > 1 else ""
    chosen = order.chosen(order.of_stage(stage, sharded=sharded), only)
    if not cfg.gates.enabled and not only:
        s.console.say(f"{title}data   {counts}\ngates  OFF (--gates.no-enabled): nothing is checked", style="yellow")
        if copies := context.data_report.get("overlap", {}).get("exact"):
            s.console.say(f"       {copies:,} validation samples are copies of training samples", style="yellow")
        if s.main:
            keep(s, spec, [], enabled=False)
        return
    everything_read = json.dumps([inventory.identity(context.scans), [x.digests for x in context.scans.values()]])
    modules = {"model": stage.model, **stage.frozen_modules}  # a pretrained model may change under the same name
    about |= {"weights": {k: sketch(m) for k, m in modules.items()}}
    mark = recipes.fingerprint(s.recipe, cfg, everything_read, **about)
    mark, known, late = _remembered(s, cfg, mark)
    from_it = {"none": "", "rehearsed": ", from the previous stage, trained on eight samples"}
    s.console.say(
        f"{title}data   {counts}\ngates  before training"
        + from_it.get(context.follows, ", from the previous stage, fully trained")
        + "\n       on the whole model in each process; the gate `sharding` compares the sharded one with it, and `resume` saves "
        "its shards" * sharded
    )
    if claims:  # a helper's passes are remembered with ours
        claims.sources = lambda: recipes.late(s.recipe, code)
    began = time.monotonic()
    verdicts = gates.run_gates(chosen, context, known=known, console=s.console, claims=claims)
    s.accelerator.free_memory()  # accelerate keeps every model that it wrapped
    if claims and not claims.main:
        return
    failed = [v for v in verdicts if v.blocks]
    if s.main:
        keep(s, spec, verdicts, enabled=True, fingerprint=mark)
        late = (late if known else {}) | recipes.late(s.recipe, code) | (claims.others_sources if claims else {})
        environment.note_sources(s.folder, s.recipe, late)
        if not failed and not only:
            gate_cache.write(mark, verdicts, late)
            if not context.deep:
                gate_cache.keep_extent(base, inventory.identity(context.scans))
    if failed:
        raise _failed(s, context, failed, of=len(verdicts))
    if not all(v.remembered for one, v in zip(chosen, verdicts, strict=True) if one.lasting):
        wall = f" of work in {time.monotonic() - began:.1f} s" if claims else ""
        s.console.say(f"       {_counted(verdicts)}{wall}")


def _counted(verdicts: list[gates.Verdict]) -> str:
    passed, skipped, waived = (sum(v.verdict == k for v in verdicts) for k in ("pass", "skip", "waived"))
    extra = "".join(f", {n} {word}" for n, word in ((skipped, "skipped"), (waived, "waived")) if n)
    return f"{passed} of {len(verdicts)} gates passed{extra}, {sum(v.seconds for v in verdicts):.1f} s"


def _remembered(s: Session, cfg: config.Config, mark: str) -> tuple[str, dict, dict]:
    """Return rank 0's `mark`, the verdicts that are stored under it, and the sources that were imported late then."""
    use_cache = cfg.gates.remember and s.folder.parent.name != "checks" and not gate_processes.is_helper()
    known, late = gate_cache.read(mark) if use_cache else ({}, {})
    known = known if recipes.unchanged(s.recipe, late) else {}
    return *agreed(s.accelerator, (mark, known)), late


def _failed(s: Session, context: gates.GateContext, failed: list[gates.Verdict], *, of: int) -> GateFailed:
    """Return the error of a stage whose gates failed: the first gate, its evidence, the command that runs it again."""
    first = leading(failed)
    checked = ["check", *s.argv, *context.argv[len(s.argv) :], "--only", first.id, *launcher_words(s.accelerator)]
    again = ["trainworthy", *(["resume", str(s.folder)] if s.recipe.fallbacks else masking.words(checked))]
    return GateFailed(
        f"{closing(first, len(failed), of)}\n"
        f"  evidence:     {s.folder / 'report.html'} and {context.folder / 'gates' / first.id}/\n"
        f"  try again:    {shlex.join(again)}"
    )


def report_data(s: Session, context: gates.GateContext, stage: Stage, base: str) -> None:
    """Scan the data into `context` and data.json. A continued run reads as much as at its start, and the data must be the
    same. Otherwise it reads as much as the last time under `base`, the fingerprint without data."""
    path = context.folder / "data.json"
    before = read_json(path).get("identity", {})
    then = before.get(context.follows, {}) if s.resumes else {}
    saved = (s.folder / "checkpoints" / context.stage).glob("step-*")
    unknown = None if before or s.resumes != "as it was" or not any(saved) else UserError(
        f"{path} cannot be read, so the data of this run's start are unknown", needed="the file that the run wrote before "
        "it trained, or --force", cause="it was removed, edited, or not copied with the run",
        next=f"trainworthy resume {s.folder} --force")  # fmt: skip
    together(s.accelerator, unknown)
    extent = {} if context.deep else agreed(s.accelerator, then or gate_cache.extent(base))
    with explain_data_errors(s.recipe, s.cfg):
        context.scans = inventory.read_all(stage.data, everything=context.deep, before=extent)
    now = inventory.identity(context.scans)
    changed = contents.changes(then, now) if then else []
    forced = s.resumes == "forced"
    refused = None if not changed or forced else UserError(
        "the data are not those this run was started with", got="; ".join(changed), needed="the same data, or --force if the "
        "change does not matter", cause=f"files of the data were changed, added or removed since {path} was written",
        next=f"trainworthy resume {s.folder} --force")  # fmt: skip
    together(s.accelerator, refused)
    if changed:
        s.console.say(f"data changed since the run began; it continues (--force): {'; '.join(changed)}", style="yellow")
    context.data_report = inventory.report(context.scans)
    if "train" in context.scans:
        for name, of in (("exchanged_classes", turned.exchanged), ("foreign_change", turned.foreign)):
            if found := of(context.scans["train"], stage.data["train"], s.cfg.run.seed):
                context.data_report[name] = asdict(found)
        if "val" in context.scans:
            plain = plain_pictures.alike(context.scans, stage.data["val"], context.data_report["overlap"])
            context.data_report["plain_pictures"] = asdict(plain)
        if "val" in context.scans and (wrong := neighbours.contradicted(context.scans, stage.data["train"])):
            context.data_report["contradicted_labels"] = asdict(wrong)
        if "val" in context.scans and (part := parts.shared(stage.data["train"], stage.data["val"])):
            context.data_report["shared_parts"] = asdict(part)
        if "val" in context.scans:
            context.data_report["label_relation"] = neighbours.relation(context.scans, stage.data["train"])
    for scan in context.scans.values():  # compared, and not read again
        scan.contents = scan.columns = None
    if s.main:
        write_whole(path, json.dumps(context.data_report | {"identity": before | {context.follows: now}}, indent=1))


def keep(s: Session, spec: stages.StageSpec, verdicts: list[gates.Verdict], **more: Any) -> None:
    """Write gates.json: the stage's to its folder, all stages' to the run folder."""
    for folder in {spec.folder(s.folder), s.folder}:
        gates.write(folder / "gates.json", verdicts, stage=spec.name, **more)
