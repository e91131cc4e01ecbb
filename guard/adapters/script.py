"""`check(factory)`: runs the gates on a plain PyTorch script, without a recipe.

Gates build everything anew and drop it. So the script passes a function that returns a `Script`: its model, optimiser,
data sets, loss and metric, and optionally its own loop and checkpoint functions.
"""

import contextlib
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trainworthy.core import gates
from trainworthy.core.base import config, seeds
from trainworthy.core.base.console import Console
from trainworthy.core.base.errors import GateFailed, UserError
from trainworthy.core.base.verdict import Verdict, closing, leading
from trainworthy.core.data import inventory
from trainworthy.core.gates import order
from trainworthy.core.gates.gate import GateContext
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.guard.adapters import adapted, loop, observed, script_stage
from trainworthy.guard.adapters.script_stage import Script as Script
from trainworthy.guard.adapters.subject import Subject
from trainworthy.guard.checks.results import counted, nearest
from trainworthy.guard.hooks import patches

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass
class Result:
    """The verdicts of one check."""

    verdicts: list[Verdict]
    folder: Path | None
    """Folder of the evidence, if one was requested."""
    kind: str = "gates"
    """What they are of: `gates`, or `checks` of a `Loop`."""

    @property
    def first(self) -> Verdict:
        """The failed one to look at first."""
        return (nearest if self.kind == "checks" else leading)(self.failed)

    @property
    def closing(self) -> str:
        """How many failed, which to look at first, and its cause, in two lines."""
        return closing(self.first, len(self.failed), len(self.verdicts), self.kind)

    @property
    def failed(self) -> list[Verdict]:
        """Verdicts that block."""
        return [v for v in self.verdicts if v.blocks]

    @property
    def ok(self) -> bool:
        """Whether no gate failed (skipped and waived ones did not pass either: read `verdicts`)."""
        return not self.failed

    def table(self, verdicts: list[Verdict] | None = None) -> str:
        """Return what each gate (or each of `verdicts`) measured; for failures also what was needed and the likely
        causes."""
        lines = []
        for v in self.verdicts if verdicts is None else verdicts:
            rows = f" ({v.rows})" if v.rows else ""
            lines.append(f"{v.verdict.upper() if v.blocks else v.verdict:<6} {v.id}{rows}: {v.title}")
            details = [("measured", v.measured), ("reason", v.reason)]
            details += [("needed", v.needed), ("likely causes", v.remedy)] if v.blocks else []
            for label, text in details:
                lines += [f"       {'' if i else label:<14}{line}" for i, line in enumerate(text.splitlines())]
        return "\n".join(lines)


def check(
    factory: Callable[[], "Script | loop.Loop | Trainer"],
    *,
    only: str | Iterable[str] = (),
    waive: dict[str, str] | None = None,
    seed: int = 0,
    raises: bool = True,
    folder: str | Path | None = None,
) -> Result:
    """Run the gates on the script that `factory` builds, and print each verdict as it comes. A `Loop` gets the
    checks of `trainworthy guard`.

    Args:
        only: ids of the gates or checks to run (default: all that apply).
        waive: {gate id: why its failure is accepted}.
        seed: of every draw: build, order, augmentation, dropout.
        raises: raise GateFailed at the end if a gate failed, with the verdict to look at first; else read the result.
        folder: where evidence is written: gates.json, data.json, gates/<id>/ with the batch and a script; default: nowhere.

    The global generators of torch, numpy and random are afterwards what they were before. `trainworthy.watch()` does not see what
    is rehearsed here. `trainworthy guard` rehearses a script several times, without its gates: no verdicts are returned there.
    """
    if patches.rehearsal is not None:
        patches.rehearsal("trainworthy.check is left out in rehearsals; it runs when the script itself does")
        return Result([], None)
    waive = waive or {}
    only = only.replace(",", " ").split() if isinstance(only, str) else list(only)
    if unreasoned := [k for k, why in waive.items() if not why.strip()]:
        raise UserError("a waived gate needs a reason", got=f"waive={{'{unreasoned[0]}': ''}}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(seeds.kept_draws())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(patches.suspended())  # rehearsals are no training of a script that is watched
        built = [factory()]  # a list: whoever takes it out frees its memory
        own = isinstance(built[0], loop.Loop)
        for name in (*only, *waive):
            if name not in (known := loop.known() if own else [*(g.id for g in order.ORDER), *_own_gates(built[0])]):
                raise config.unknown(f"{'check' if own else 'gate'} '{name}'", name, known)
        where = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        where.mkdir(parents=True, exist_ok=True)
        if own:
            kept = where if folder is not None else None
            verdicts = loop.check(factory, built, only, waive, seed, kept, _place(factory))
        else:
            verdicts = _prove(factory, built, only, waive, seed, where, written=folder is not None)
    result = Result(verdicts, where if folder is not None else None, "checks" if own else "gates")
    if raises and result.failed:
        raise GateFailed(f"{result.closing}\n\n{result.table([result.first])}")
    return result


def _is_trainer(made: Any) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and isinstance(made, library.Trainer)


def _own_gates(made: Any) -> Sequence[str]:
    """Return the ids of the gates that only a script or only a trainer has."""
    if not _is_trainer(made):
        return (*observed.OWN, *observed.OF_LOOPS)
    from trainworthy.guard.adapters.trainer_gates import GATES

    return ["names", *(g.id for g in GATES)]


def _place(factory: Callable) -> str:
    """Return where the factory is written."""
    return (inspect.getsourcefile(factory) if inspect.isfunction(factory) else None) or type(factory).__name__


def _prove(
    factory: Callable[[], "Script | Trainer"],
    built: list,
    only: list[str],
    waive: dict[str, str],
    seed: int,
    folder: Path,
    *,
    written: bool,
) -> list[Verdict]:
    console = Console()
    subject = _subject(factory, built.pop(), seed, folder)
    if "leakage" in waive:  # it looks for samples of both splits, too
        subject.skips["samples"] = f"leakage is waived: {waive['leakage']}"
    cfg, make, alone = subject.cfg, subject.make, _Alone(subject.device)
    stage = gates.build(Run(cfg, alone, rehearsal=Rehearsal(steps=1)), make)
    scans = {name: inventory.scan(name, data) for name, data in stage.data.items()}
    report = inventory.report(scans)
    context = GateContext(
        cfg, alone, make, subject.train, folder, scans, report, again=partial(adapted.again, factory, seed), sized=False
    )
    counts = " / ".join(f"{s.total:,} {name}" for name, s in scans.items())
    objective = f"\nloss   {subject.objective}" if subject.objective else ""
    console.say(f"{_place(factory)} · seed {seed} · {alone.device}\ndata   {counts}{objective}\ngates")
    verdicts: list[Verdict] = []
    with gates.quick_collections():
        last = observed.OF_LOOPS if subject.see and subject.own_loop else ()
        own, loops = (observed.gates(subject.see, ids) if subject.see else () for ids in (observed.OWN, last))
        own = own or observed.gates(lambda _: observed.source(factory), ("names",))  # of a trainer
        rest = (gate for gate in order.OF_TRAINING if gate.id not in last)
        for gate in (*order.OF_DATA, *own, *rest, *loops, *stage.gates):
            if not only or gate.id in only:
                cfg.gates.waive, cfg.gates.because = (gate.id,) if gate.id in waive else (), waive.get(gate.id, "")
                verdicts += gates.run_gates([adapted.adapted(gate, subject)], context, known={}, console=console)
                if verdicts[-1].id == "wiring" and verdicts[-1].blocks:
                    subject.skips["gradients"] = "wiring failed, and has its cause"
    if written:
        gates.write(folder / "gates.json", verdicts, enabled=True)
        (folder / "data.json").write_text(json.dumps(report, indent=1))
    console.say(f"       {counted(verdicts)} of {len(verdicts)} gates, {sum(v.seconds for v in verdicts):.1f} s")
    return verdicts


# ------------------------------------------------------------------------------------------------------------- the stage
def _subject(factory: Callable[[], Any], first: Any, seed: int, folder: Path) -> Subject:
    if _is_trainer(first):
        from trainworthy.guard.adapters.trainer import subject

        return subject(factory, seed)
    probe = script_stage.fresh(first, factory())
    device, own = next(probe.model.parameters()).device, probe.train_loop is not None
    found = script_stage.objective(probe)
    found.own_target = script_stage.self_supervised(probe)
    make = partial(script_stage.make_stage, factory, folder, found)
    return Subject(
        script_stage.settings(probe, seed), device, make, script_stage.train, adapted.skips(probe, found), own, str(found),
        observed.observer(factory, seed),
    )  # fmt: skip


@dataclass
class _Alone:
    """One process on the script's own device. Accelerate's state is global, and the script may use Accelerate
    itself."""

    device: torch.device
    process_index: int = 0
    num_processes: int = 1
    mixed_precision: str = "no"
    is_main_process: bool = True

    def wait_for_everyone(self) -> None:
        """Do nothing: there is one process."""

    def free_memory(self) -> None:
        """Do nothing: nothing is wrapped."""
