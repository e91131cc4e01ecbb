"""Runs gates in order. It prints each verdict at once, stores a repro of each failure and writes gates.json."""

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainworthy.core.base import masking
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import Stop
from trainworthy.core.base.files import write_whole
from trainworthy.core.base.origin import frames
from trainworthy.core.base.processes import agreed, launcher_words
from trainworthy.core.base.verdict import Finding, Skip, Verdict
from trainworthy.core.data.pictures import contact_sheet
from trainworthy.core.gates.claims import Claims
from trainworthy.core.gates.gate import Gate, GateContext
from trainworthy.core.loop.run import Rehearsal
from trainworthy.core.recipe.stage import categorical as categorical

LONGEST = 600  # characters of an exception in a verdict


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Disable TF32 inside. TF32 keeps 10 mantissa bits of fp32's 23, so its errors of 1e-3 would hide the differences
    that gates look for."""
    kinds = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [kind.allow_tf32 for kind in kinds]
    for kind in kinds:
        kind.allow_tf32 = False
    try:
        yield
    finally:
        for kind, was in zip(kinds, before, strict=True):
            kind.allow_tf32 = was


def run_gates(
    gates: list[Gate], context: GateContext, *, known: dict[str, dict], console: Console, claims: Claims | None = None
) -> list[Verdict]:
    """Run each gate in order, print verdicts in that order as soon as they are there, and store a repro of each failure. Continue
    after a failure, since the other verdicts help to find the cause. `claims`: other processes that take gates, too; the
    main one (every rank of it) returns the verdicts of all."""
    known = {one.id: known[one.id] for one in gates if one.lasting and one.id in known}
    all_known = bool(known) and all(one.id in known for one in gates if one.lasting)
    early: dict[str, Verdict] = {}  # gates that ran early, because another one failed
    found: dict[str, Verdict] = {}
    raised: dict[str, str] = {}  # an exception, and the first gate that it ended
    printed = 0

    def show() -> None:
        nonlocal printed
        while printed < len(gates) and (verdict := found.get(gates[printed].id)):
            printed += 1
            if not all_known or verdict.verdict in ("fail", "waived"):
                first = raised.setdefault(verdict.measured, verdict.id) if _raised(verdict) else verdict.id
                _show(verdict, console, as_in="" if first == verdict.id else first)

    def first(ask: Callable[[], Any]) -> Any:  # rank 0 alone sees the claims
        return agreed(context.accelerator, ask() if context.accelerator.is_main_process else None)

    def work(i: int, one: Gate) -> Verdict:
        verdict = Verdict(**{**known[one.id], "seconds": 0.0}) if one.id in known else None
        verdict = verdict or early.get(one.id) or _check_timed(one, context)
        if verdict.verdict == "fail" and one.symptom and not _raised(verdict):
            _explain(verdict, [g for g in gates[i + 1 :] if g.explains and g.id not in known], early, context)
        verdict.stage, verdict.reads = context.stage, list(one.reads)
        if verdict.verdict == "fail" and one.id in context.cfg.gates.waive:
            verdict.verdict, verdict.reason = "waived", context.cfg.gates.because
        context.failed += [one.id] * (verdict.verdict == "fail")
        return verdict

    for i, one in enumerate(gates):
        if claims is None or first(lambda one=one: claims.take(one.id, of_ranks=one.compares_ranks)):
            found[one.id] = work(i, one)
            if claims:
                claims.put(found[one.id])
        if claims and claims.main:
            due = [g.id for g in gates[printed : i + 1] if g.id not in found]
            found |= first(lambda due=due: {name: v for name in due if (v := claims.get(name))}) if due else {}
        show()
    if claims and claims.main:
        for i, one in enumerate(gates):
            if one.id not in found:
                found[one.id] = first(lambda name=one.id: claims.wait(name)) or work(i, one)
                show()
    verdicts = [found[one.id] for one in gates if one.id in found]
    if all_known and not any(v.blocks for v in verdicts):
        stamp = next(v.remembered for v in verdicts if v.remembered)
        again = ", ".join(one.id for one in gates if not one.lasting)
        console.say(
            f"  all {len(gates)} verdicts are remembered from {stamp}: same recipe, data and environment"
            + (f" ({again} run again)" if again else ""),
            style="green",
        )
    return verdicts


def _check_timed(one: Gate, context: GateContext) -> Verdict:
    started = time.monotonic()
    context.put_away()
    with full_precision():
        verdict = _check(one, context)
    verdict.seconds = round(time.monotonic() - started, 2)
    return verdict


def _explain(verdict: Verdict, gates: list[Gate], early: dict[str, Verdict], context: GateContext) -> None:
    """Run the gates that explain a failed symptom, and put the cause that they find before its likely causes: the first cause
    that was measured, else the first likely cause of the first gate that fails."""
    best = None
    for one in gates:
        if one.id not in early:
            early[one.id] = _check_timed(one, context)
        found = early[one.id]
        if found.verdict == "fail":
            best = found if best is None or found.cause else best
            if best.cause:
                break
    if best is not None:
        first = best.remedy.splitlines()[0] if best.remedy else ""
        other = f"{first} (the gate `{best.id}` fails, too: {best.measured})"
        own, *others = verdict.remedy.splitlines() or [""]
        known = bool(verdict.cause) and not best.cause  # what this gate measured goes before a list's first line
        verdict.remedy = "\n".join([own, other, *others] if known else [other, own, *others])
        verdict.evidence = {**verdict.evidence, "explained_by": best.id}


def _check(one: Gate, context: GateContext) -> Verdict:
    world = context.accelerator.num_processes
    skipped = ""
    try:
        finding = one.check(context)
    except Skip as skip:
        finding, skipped = Finding(True, "", ""), str(skip)
    except Stop:
        raise
    except (Exception, SystemExit) as error:  # a recipe may call sys.exit()
        if world > 1:
            raise  # other ranks wait in a collective, so the launcher must end them
        held = context.once("stale", lambda: _stale(context))
        if held and context.memo.setdefault("stale in", one.id) != one.id:
            skipped = f"the optimiser holds parameters of another model (see {context.memo['stale in']})"
        finding = Finding(True, "", "") if skipped else Finding(
            False, f"the optimiser holds parameters of another model: none of its {held} tensors is in the model that is trained",
            "an optimiser over the parameters of the model",
            "the optimiser was built before the model was replaced or copied (deepcopy, a wrapper, a second call of the factory): "
            "build it last, over the very model that is trained", evidence={"error": _cut(f"{type(error).__name__}: {error}")},
        ) if held else Finding(
            False, _cut(f"raised {type(error).__name__}: {error}"), "no exception",
            _where(error, context.train),
            evidence={"traceback": [_cut(line, 10) for line in traceback.format_exception(error)]},
        )  # fmt: skip
    worst = 0 if not finding.ok else 1 if skipped else 2
    if world > 1:  # the worst verdict of any rank counts
        shared = torch.tensor(worst, device=context.accelerator.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        worst = int(shared.item())
    if worst == 1:
        reason = skipped or "skipped on another process"
        return Verdict(one.id, one.rows, one.title, "skip", "", "", "", 0.0, reason=reason)
    ok = worst == 2
    if finding.cause:  # the list of likely causes often has it, too, without the evidence
        clause = finding.cause.split(" (")[0].split(":")[0]
        others = [line for line in finding.remedy.splitlines() if not line.startswith(clause)]
        finding.remedy = "\n".join([finding.cause, *others])
    if not ok and finding.ok:
        finding.measured += " (failed on another process)"
    verdict = Verdict(one.id, one.rows, one.title, "pass" if ok else "fail", finding.measured, finding.needed,
                      "" if ok else finding.remedy, 0.0, evidence=finding.evidence, cause="" if ok else finding.cause)  # fmt: skip
    if not ok and context.accelerator.is_main_process:
        _keep_repro(verdict, finding, context)
    return verdict


def _raised(verdict: Verdict) -> bool:
    return verdict.verdict == "fail" and "traceback" in verdict.evidence


def _where(error: BaseException, train: Callable) -> str:
    """Return the line of the user's code that raised, and below it the line of a library where it ended. Between them comes
    what a loop has not got in a rehearsal, if it raised for lack of a value."""
    places = list(dict.fromkeys(f"{f.filename}:{f.lineno}: {f.line}" for f in frames(error)))
    lacks = isinstance(error, UnboundLocalError) or "NoneType" in str(error)
    if lacks and any(f.f_code is getattr(train, "__code__", None) for f, _ in traceback.walk_tb(error.__traceback__)):
        places.insert(1, "if an evaluation gives this value: a rehearsal may end before the first one, as a stopped run does; give it a value "
                         "before the loop (`kept = copy.deepcopy(model.state_dict())`)")  # fmt: skip
    return "\n".join(places)


def _cut(text: str, times: int = 1) -> str:
    """Return the text of an exception without its middle, if it is long: a KeyError shows its key, which may be a picture."""
    half = times * LONGEST // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def _stale(context: GateContext) -> int:
    """Return the number of tensors in the optimisers if none of them is a parameter of the model; else 0."""
    try:
        _, stage = context.look()
    except Exception:  # another gate reports a stage that cannot be built
        return 0
    held = {id(p) for o in stage.optimizers.values() for g in o.param_groups for p in g["params"]}
    return 0 if held & {id(p) for p in stage.model.parameters()} else len(held)


def _keep_repro(verdict: Verdict, finding: Finding, context: GateContext) -> None:
    """Write gates/<id>/: the batch, an image if the recipe can draw one, and a script of ten lines."""
    folder = context.folder / "gates" / verdict.id
    folder.mkdir(parents=True, exist_ok=True)
    if finding.batch is not None:
        tensors = {k: v.detach().cpu().contiguous() for k, v in finding.batch.items() if isinstance(v, torch.Tensor)}
        save_file(tensors, folder / "batch.safetensors")
        _, stage = context.build(Rehearsal(steps=1))
        if stage.preview:
            try:
                contact_sheet(stage.preview({k: v.cpu() for k, v in tensors.items()}), folder / "batch.png")
            except Exception as error:  # a preview is a fork's own code, and the verdict matters more
                why = _cut(f"preview raised {type(error).__name__}: {error}")
                verdict.evidence = {**verdict.evidence, "no_picture": why}
    command = ["check", *masking.words(context.argv), "--only", verdict.id, *launcher_words(context.accelerator)]
    again = (
        f'command = [sys.executable, "-m", "trainworthy", *{command!r}]\n'
        'sys.exit(subprocess.run(command, env={**os.environ, "PYTHONSAFEPATH": "1"}).returncode)'
    )
    (folder / "repro.py").write_text(
        f'"""{verdict.title}: {verdict.measured} (needed: {verdict.needed})."""\n'
        "import os\nimport subprocess\nimport sys\nfrom pathlib import Path\n\n"
        "from safetensors.torch import load_file\n\n"
        'batch = Path(__file__).with_name("batch.safetensors")\n'
        "for name, tensor in (load_file(batch) if batch.exists() else {}).items():\n"
        "    print(name, tuple(tensor.shape), tensor.dtype, tensor.float().min().item(), tensor.float().max().item())\n"
        f"{context.again(verdict.id) if context.again else again}\n"
    )


def _show(v: Verdict, console: Console, *, as_in: str = "") -> None:
    """Print a verdict. `as_in`: the gate that the same exception ended before."""
    mark = {"pass": "pass", "fail": "FAIL", "skip": "skip", "waived": "waived"}[v.verdict]
    style = {"pass": "green", "fail": "bold red", "skip": "yellow", "waived": "yellow"}[v.verdict]
    tail = f"passed on {v.remembered}" if v.remembered else f"{v.seconds:.1f} s"
    said = f"raised what `{as_in}` raised" if as_in else v.measured or v.reason
    said = said.replace("\n", "\\n")  # a text of the data may have several lines
    console.say(f"  {mark:<6} {v.id:<13} {said}  [{tail}]", style=style)
    if as_in:
        return
    if v.verdict in ("fail", "waived"):
        console.say(f"         {'needed':<13} {v.needed}")
    if v.verdict == "fail":
        for i, line in enumerate(v.remedy.splitlines()):
            console.say(f"         {'likely causes' if i == 0 else '':<13} {line}")
    if v.verdict == "waived":
        console.say(f"         {'waived':<13} {v.reason}")


def write(path: Path, verdicts: list[Verdict], *, stage: str = "", **more: Any) -> None:
    """Write gates.json: these verdicts, after those of other stages in the file."""
    before = json.loads(path.read_text())["gates"] if stage and path.exists() else []
    rows = [v for v in before if v["stage"] != stage] + [asdict(v) for v in verdicts]
    cost = round(sum(v["seconds"] for v in rows), 2)
    write_whole(path, masking.hide(json.dumps({"gates": rows, "seconds": cost, **more}, indent=1, default=str)))
