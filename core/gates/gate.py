"""Defines a gate: a named function from `GateContext` to `Finding`. It builds its own stage and drops it afterwards."""

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from trainworthy.core.base import config, seeds
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data import inventory
from trainworthy.core.data.loader import Keyed, to_device
from trainworthy.core.loop import shard
from trainworthy.core.loop.init_from import read_weights, start_from
from trainworthy.core.loop.run import Plan, Run, denominator
from trainworthy.core.recipe.stage import PARTS, Data, Expect, Stage
from trainworthy.core.recipe.stage import categorical as categorical

HOST = torch.device("cpu")


@dataclass
class Gate:
    """A named check that must pass before training."""

    id: str
    rows: str
    title: str
    prove: Callable[["GateContext"], Finding]
    reads: tuple[str, ...] = PARTS
    """Parts of a recipe that can change the verdict."""
    lasting: bool = True
    """Whether a pass may be remembered. Gates that read the data report run every time, because each run makes it
    again."""
    symptom: bool = False
    """Whether many causes lead to its failure. The runner then asks the gates that explain, before it prints."""
    explains: bool = False
    """Whether it compares with an independent formula or definition, so that its failure names a cause."""


def gate(
    id: str, *, rows: str, title: str, reads: str = " ".join(PARTS), lasting: bool = True, symptom: bool = False,
    explains: bool = False,
) -> Callable[[Callable[["GateContext"], Finding]], Gate]:  # fmt: skip
    """Turn a function into a gate. `reads` lists the parts of a recipe that the gate uses (default: all, so that none
    is forgotten). `frozen_modules` belong to the loss and to the evaluation, so they are added with either."""
    parts = reads.split()
    if {"loss", "evaluate"} & {*parts} and "frozen_modules" not in parts:
        parts.append("frozen_modules")
    return lambda prove: Gate(id, rows, title, prove, tuple(parts), lasting, symptom, explains)


@dataclass
class GateContext:
    """What a gate works with: a factory of stages, the recipe's own `train`, and results shared between gates."""

    cfg: config.Config
    accelerator: Accelerator
    make: Callable[[Run], Stage]
    """Builds a fresh stage; the same seeds give the same stage."""
    train: Callable[[config.Config, Run, Stage], None]
    folder: Path
    scans: dict[str, inventory.Scan]
    data_report: dict[str, Any]
    argv: list[str] = field(default_factory=list)
    """Recipe and settings as the user gave them. Gates that need a new process start it with these."""
    deep: bool = False
    half_in: Path | None = None
    """Set in the process that a deep resume gate starts: train only the first half, into this folder."""
    again: Callable[[str], str] | None = None
    """Gate id -> lines of its repro that run it again. Default: `check` of `argv`."""
    sized: bool = True
    """Whether the length of the full run is known. For a script it is not."""
    stage: str = ""
    """Name of the stage under test."""
    follows: Literal["none", "rehearsed", "trained"] = "none"
    """The stage before this one: none, one that the gates trained on eight samples, or one that this run has
    trained."""
    memo: dict[str, Any] = field(default_factory=dict)

    def build(self, plan: Plan) -> tuple[Run, Stage]:
        """Build a run and a stage as the full run will."""
        run = Run(self.cfg, self.accelerator, plan=plan)
        return run, build(run, self.make)

    def look(self) -> tuple[Run, Stage]:
        """Return a run and a stage for inspection, built once for all gates. No gate may train, change or evaluate it
        with gradients."""
        return self.once("look", lambda: self.build(Plan(steps=1)))

    @property
    def expect(self) -> Expect:
        """`Stage.expect` of a fresh stage."""
        return self.peek().expect

    def peek(self) -> Stage:
        """Return the stage of `look` for everything but its weights, which may be on the host."""
        return self.memo["look"][1] if "look" in self.memo else self.look()[1]

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once for all gates. A stage in it is not trained any more."""
        if key not in self.memo:
            self.memo[key] = make()
            for stage in _stages(self.memo[key]):
                release(stage)
        for stage in _stages(self.memo[key]):
            move(stage, self.accelerator.device)
        return self.memo[key]

    def put_away(self) -> None:
        """Keep the weights of the stages that gates share on the host until a gate asks for them. Called before each
        gate."""
        for made in self.memo.values():
            for stage in _stages(made):
                move(stage, HOST)


Proof = GateContext  # its name in 0.2: gates of forks may import it


def _stages(made: Any) -> list[Stage]:
    parts = made if isinstance(made, tuple) else (getattr(made, "stage", None),)
    return [part for part in parts if isinstance(part, Stage)]


def move(stage: Stage, device: torch.device) -> None:
    """Move the weights of a stage and their average. Quantised weights (integers) stay where they are."""
    for net in (stage.model, stage.eval_model):
        if all(p.is_floating_point() for p in net.parameters()) and any(p.device != device for p in net.parameters()):
            net.to(device)


def release(stage: Stage) -> None:
    """Drop what only training needs of a stage that gates keep: gradients and the optimisers' state, with AdamW three
    times its trained weights."""
    for optimizer in stage.optimizers.values():
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            parameter.grad = None
        if isinstance(state := getattr(optimizer, "state", None), dict):
            state.clear()
    stage.wrapped = None  # with several processes, the buckets of its gradients


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Inside, Python's collector leaves out what exists already, so that `build` may call it each time: modules and
    data that were read before take it a third of a second. Afterwards, nothing of the gates is alive."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def build(run: Run, make: Callable[[Run], Stage]) -> Stage:
    """Build a stage from the run's seed alone, on the run's device, sharded if the run is. Before it, free the stages
    that nothing but a circle of references holds: a closure that knows its run or its stage."""
    if run.world > 1:
        run.accelerator.free_memory()  # accelerate keeps every model that it wrapped
    gc.collect()
    seeds.seed_global(run.cfg.run.seed, "build")
    stage = make(run)
    if run.cfg.init_from:
        start_from(stage, Path(run.cfg.init_from), trust_pickle=run.cfg.trust_pickle)
        if stage.ema_model is not None:  # the recipe copied it before these weights were loaded
            stage.ema_model.load_state_dict(stage.model.state_dict())
    if stage.on_start:
        stage.on_start()
    if run.plan is None:  # the full run: free the memory of what only gates use
        stage.pretrained = None
        read_weights.cache_clear()
    if run.shard != shard.NONE:
        shard.apply(stage, run)
    else:
        stage.model.to(run.device)
        stage.eval_model.to(run.device)
    for module in stage.frozen_modules.values():
        module.to(run.device).eval().requires_grad_(False)
    return stage


def pick(data: Data, n: int, seed: int, *, only: Collection[int] | None = None) -> list[int]:
    """Return indices of `n` samples, in turn from each class of a categorical target (only from classes in `only`, if
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


def fetch(data: Data, indices: list[int], generator_seed: int | None, device: torch.device) -> dict:
    """Return a collated batch of samples on the training path (with fixed draws) or, with None, on the evaluation
    path."""
    epoch = -1 if generator_seed is None else 0
    keyed = Keyed(data, generator_seed or 0)
    return to_device(data.collate([keyed[(epoch, i)] for i in indices]), device)


def train_set(stage: Stage) -> Data:
    """Return the training set. Skips the gate if the loop makes its own samples."""
    if "train" not in stage.data:
        raise Skip("no training set: the loop makes its own samples")
    return stage.data["train"]


def total_loss(run: Run, stage: Stage, batch: dict) -> torch.Tensor:
    """Return the mean loss of one batch on this process: each term's sum over its denominator, in the run's
    precision."""
    counts = stage.counts(batch)
    with run.autocast():
        terms = stage.loss(stage.model, batch)
    return functools.reduce(torch.add, (s / denominator(t, counts) for t, s in terms.items()))
