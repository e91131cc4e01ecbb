"""Gates: what must be proved before the budget is spent. Each is a function from `Proof` to `Finding`, in `ORDER`.

A gate builds its own stage and throws it away, reads no names, flags or source, and says what it measured, what was needed,
the likely causes in order and the next command.
"""

import json
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator

from core import config, inventory, seeds
from core.console import Console
from core.errors import Stop
from core.pretrained import read_weights, start_from
from core.run import Plan, Run, denominator
from core.stage import Data, Expect, Stage

PARTS = (*(f.name for f in fields(Stage)), "train")
"""Parts of a recipe: what it gives its stage, and its loop."""


@dataclass
class Finding:
    """What a gate saw."""

    ok: bool
    measured: str
    needed: str
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Plain values for gates.json."""
    batch: dict | None = None
    """The batch at fault, kept with the repro."""


class Skip(Exception):
    """This gate does not apply, for the reason given."""


@dataclass
class Verdict:
    """One line of gates.json. A skip is never a pass."""

    id: str
    rows: str
    title: str
    verdict: Literal["pass", "fail", "skip", "waived", "advice"]
    measured: str
    needed: str
    remedy: str
    seconds: float
    reason: str = ""
    remembered: str = ""
    """When an identical recipe passed, if it was not proved again now."""
    stage: str = ""
    """The stage it was proved of."""
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> bool:
        return self.verdict == "fail"


@dataclass
class Gate:
    """A named proof."""

    id: str
    rows: str
    title: str
    prove: Callable[["Proof"], Finding]
    reads: tuple[str, ...] = PARTS
    """Parts of a recipe whose change it may see."""


def gate(
    id: str, *, rows: str, title: str, reads: str = " ".join(PARTS)
) -> Callable[[Callable[["Proof"], Finding]], Gate]:
    """Make a function a gate. `reads`: parts of a recipe that it looks at; every part unless said, so that none is forgotten. What
    stands beside the model is a part of its loss and of its evaluation."""
    parts = reads.split()
    if {"loss", "evaluate"} & {*parts} and "beside" not in parts:
        parts.append("beside")
    return lambda prove: Gate(id, rows, title, prove, tuple(parts))


@dataclass
class Proof:
    """What gates work with: a factory of stages, the recipe's own `train`, and what earlier gates already found."""

    cfg: config.Config
    accelerator: Accelerator
    make: Callable[[Run], Stage]
    """Builds the stage afresh; the same seeds give the same stage."""
    train: Callable[[config.Config, Run, Stage], None]
    folder: Path
    scans: dict[str, inventory.Scan]
    data_report: dict[str, Any]
    argv: list[str] = field(default_factory=list)
    """Recipe and settings as the user gave them; gates that need a new process start it with these."""
    deep: bool = False
    half_in: Path | None = None
    """Set in the process that a deep resume gate starts: train the first half into this folder, no more."""
    again: Callable[[str], str] | None = None
    """Gate id -> the lines of its repro that prove it again; default: `check` of `argv`."""
    sized: bool = True
    """Is it known how long the run will be? Of a script it is not."""
    stage: str = ""
    """Name of the stage that is proved."""
    follows: Literal["none", "rehearsed", "trained"] = "none"
    """What it starts from: no stage before; one that the gates trained on eight samples; the one this run has trained."""
    memo: dict[str, Any] = field(default_factory=dict)

    def build(self, plan: Plan) -> tuple[Run, Stage]:
        """A fresh run and stage, as the full run will build them."""
        run = Run(self.cfg, self.accelerator, plan=plan)
        return run, build(run, self.make)

    def look(self) -> tuple[Run, Stage]:
        """A fresh run and stage to look at, built once for all gates: nobody trains, changes or evaluates it with gradients."""
        return self.once("look", lambda: self.build(Plan(steps=1)))

    @property
    def expect(self) -> Expect:
        """What a fresh stage expects."""
        return self.look()[1].expect

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, computed once for all gates."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


def build(run: Run, make: Callable[[Run], Stage]) -> Stage:
    """A stage from the run's seed alone, on the run's device."""
    seeds.seed_global(run.cfg.run.seed, "build")
    stage = make(run)
    if run.cfg.init_from:
        start_from(stage, Path(run.cfg.init_from), trust_pickle=run.cfg.trust_pickle)
        if stage.average is not None:  # it was copied from the model before that
            stage.average.load_state_dict(stage.model.state_dict())
    if stage.begin:
        stage.begin()
    if run.plan is None:  # the full run: what only gates compare with is not held in memory
        stage.pretrained = None
        read_weights.cache_clear()
    stage.model.to(run.device)
    stage.judged.to(run.device)
    for module in stage.beside.values():
        module.to(run.device).eval().requires_grad_(False)
    return stage


def pick(data: Data, n: int, seed: int, *, only: Collection[int] | None = None) -> list[int]:
    """Indices of `n` samples, spread over the classes of a categorical target (round robin; of the classes in `only`, if
    given), else at random."""
    order = data.order(seed, "pick").tolist()
    key = categorical(data)
    if key is None:
        return order[:n]
    queues: dict[int, list[int]] = {}
    for i in order[: min(64 * n, max(8 * n, 4096))]:
        label = int(data.peek(i, key))
        if only is None or label in only:
            queues.setdefault(label, []).append(i)
    found: list[int] = []
    while len(found) < min(n, len(order)):
        for queue in queues.values():
            if queue and len(found) < n:
                found.append(queue.pop())
        if not any(queues.values()):
            break
    return found


def categorical(data: Data) -> str | None:
    """Name of the first target that is a class, if there is one."""
    return next((k for k, f in data.fields.items() if f.role == "target" and f.classes), None)


def agreed(accelerator: Accelerator, value: Any) -> Any:
    """Rank 0's `value` on every rank: what decides whether a collective is entered must be the same everywhere."""
    if accelerator.num_processes == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def fetch(data: Data, indices: list[int], generator_seed: int | None, device: torch.device) -> dict:
    """A collated batch of samples on the training path (fixed draws) or, with None, on the evaluation path."""
    from core.loader import Keyed, to_device

    epoch = -1 if generator_seed is None else 0
    keyed = Keyed(data, generator_seed or 0)
    return to_device(data.collate([keyed[(epoch, i)] for i in indices]), device)


def train_set(stage: Stage) -> Data:
    """The training set; a gate that needs one has nothing to judge where the loop makes its own samples."""
    if "train" not in stage.data:
        raise Skip("no training set: the loop makes its own samples")
    return stage.data["train"]


def total_loss(run: Run, stage: Stage, batch: dict) -> torch.Tensor:
    """Mean loss of one batch on this process: every term's sum over its denominator, in the run's precision."""
    counts = stage.counts(batch)
    with run.autocast():
        terms = stage.loss(stage.model, batch)
    return sum(s / denominator(t, counts) for t, s in terms.items())


def run_gates(gates: list[Gate], proof: Proof, *, known: dict[str, dict], console: Console) -> list[Verdict]:
    """Prove each gate in order, print its verdict as it comes, keep a repro of what failed. Goes on after a failure: the
    other verdicts help to find the cause."""
    verdicts, cfg = [], proof.cfg
    if known and all(one.id in known for one in gates):
        verdicts = [Verdict(**{**known[one.id], "seconds": 0.0}) for one in gates]
        console.say(
            f"  all {len(gates)} verdicts stand as proved {verdicts[0].remembered}: the same recipe, data and environment",
            style="green",
        )
        return verdicts
    for one in gates:
        started = time.monotonic()
        if one.id in known:
            verdict = Verdict(**{**known[one.id], "seconds": 0.0})
        else:
            verdict = _prove(one, proof)
            verdict.seconds = round(time.monotonic() - started, 2)
        verdict.stage = proof.stage
        if verdict.verdict == "fail" and one.id in cfg.gates.waive:
            verdict.verdict, verdict.reason = "waived", cfg.gates.because
        verdicts.append(verdict)
        _show(verdict, console)
    return verdicts


def _prove(one: Gate, proof: Proof) -> Verdict:
    world = proof.accelerator.num_processes
    skipped = ""
    try:
        finding = one.prove(proof)
    except Skip as skip:
        finding, skipped = Finding(True, "", ""), str(skip)
    except Stop:
        raise
    except Exception as error:
        if world > 1:
            raise  # other ranks wait in a collective: the launcher must end them
        frame = traceback.extract_tb(error.__traceback__)[-1]
        finding = Finding(
            False, f"raised {type(error).__name__}: {error}", "no exception",
            f"{frame.filename}:{frame.lineno}: {frame.line}",
            evidence={"traceback": traceback.format_exception(error)},
        )  # fmt: skip
    worst = 0 if not finding.ok else 1 if skipped else 2
    if world > 1:  # the worst verdict of any rank counts
        shared = torch.tensor(worst, device=proof.accelerator.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        worst = int(shared.item())
    if worst == 1:
        reason = skipped or "skipped on another process"
        return Verdict(one.id, one.rows, one.title, "skip", "", "", "", 0.0, reason=reason)
    ok = worst == 2
    if not ok and finding.ok:
        finding.measured += " (failed on another process)"
    verdict = Verdict(one.id, one.rows, one.title, "pass" if ok else "fail", finding.measured, finding.needed,
                      "" if ok else finding.remedy, 0.0, evidence=finding.evidence)  # fmt: skip
    if not ok and proof.accelerator.is_main_process:
        _keep_repro(verdict, finding, proof)
    return verdict


def _keep_repro(verdict: Verdict, finding: Finding, proof: Proof) -> None:
    """gates/<id>/: the batch, a picture where the recipe can draw one, and a script of ten lines."""
    folder = proof.folder / "gates" / verdict.id
    folder.mkdir(parents=True, exist_ok=True)
    if finding.batch is not None:
        from safetensors.torch import save_file

        tensors = {k: v.detach().cpu().contiguous() for k, v in finding.batch.items() if isinstance(v, torch.Tensor)}
        save_file(tensors, folder / "batch.safetensors")
        from core.pictures import contact_sheet

        _, stage = proof.build(Plan(steps=1))
        if stage.preview:
            contact_sheet(stage.preview({k: v.cpu() for k, v in tensors.items()}), folder / "batch.png")
    command = ["check", *proof.argv, "--only", verdict.id]
    again = (
        f'command = [sys.executable, "-m", "core.launch", *{command!r}]\n'
        'sys.exit(subprocess.run(command, env={**os.environ, "PYTHONSAFEPATH": "1"}).returncode)'
    )
    (folder / "repro.py").write_text(
        f'"""{verdict.title}: {verdict.measured} (needed: {verdict.needed})."""\n'
        "import os\nimport subprocess\nimport sys\nfrom pathlib import Path\n\n"
        "from safetensors.torch import load_file\n\n"
        'batch = Path(__file__).with_name("batch.safetensors")\n'
        "for name, tensor in (load_file(batch) if batch.exists() else {}).items():\n"
        "    print(name, tuple(tensor.shape), tensor.dtype, tensor.float().min().item(), tensor.float().max().item())\n"
        f"{proof.again(verdict.id) if proof.again else again}\n"
    )


def _show(v: Verdict, console: Console) -> None:
    mark = {"pass": "pass", "fail": "FAIL", "skip": "skip", "waived": "waived"}[v.verdict]
    style = {"pass": "green", "fail": "bold red", "skip": "yellow", "waived": "yellow"}[v.verdict]
    tail = f"proved {v.remembered}" if v.remembered else f"{v.seconds:.1f} s"
    console.say(f"  {mark:<6} {v.id:<13} {v.measured or v.reason}  [{tail}]", style=style)
    if v.verdict in ("fail", "waived"):
        console.say(f"         {'needed':<13} {v.needed}")
    if v.verdict == "fail":
        for i, line in enumerate(v.remedy.splitlines()):
            console.say(f"         {'likely causes' if i == 0 else '':<13} {line}")
    if v.verdict == "waived":
        console.say(f"         {'waived':<13} {v.reason}")


def write(path: Path, verdicts: list[Verdict], *, stage: str = "", **more: Any) -> None:
    """gates.json: these verdicts, behind those of other stages that stand there already."""
    before = json.loads(path.read_text())["gates"] if stage and path.exists() else []
    rows = [v for v in before if v["stage"] != stage] + [asdict(v) for v in verdicts]
    cost = round(sum(v["seconds"] for v in rows), 2)
    path.write_text(json.dumps({"gates": rows, "seconds": cost, **more}, indent=1, default=str))


def __getattr__(name: str):
    if name == "ORDER":
        from core.gates import data, fabricated, learning, norms, pretrained, rates, reading, rehearsal

        return [
            data.schema, data.inventory_gate, data.leakage, fabricated.fabricated, learning.initial_loss, pretrained.init,
            rehearsal.wiring, norms.batch_norm, rates.schedule, rates.terms, learning.dependency, learning.overfit,
            learning.baseline, rehearsal.evaluation, rehearsal.accumulation, reading.reading, rates.range_test,
            learning.tiny_data, rehearsal.resume,
        ]  # fmt: skip
    raise AttributeError(name)
