"""Defines a gate: a named function from `GateContext` to `Finding`. It builds its own stage and drops it afterwards."""

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainworthy.core.base import config, seeds
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data import inventory
from trainworthy.core.data.loader import Keyed, cut, to_device
from trainworthy.core.loop import gradient_checkpointing, shard
from trainworthy.core.loop.init_from import read_weights, start_from
from trainworthy.core.loop.run import Rehearsal, Run
from trainworthy.core.loop.update import denominator, summed
from trainworthy.core.recipe.stage import PARTS, Data, Expect, Stage
from trainworthy.core.recipe.stage import categorical as categorical

Item = TypeVar("Item")
HOST = torch.device("cpu")
SHARED = "in_memory_of_an_earlier_build"  # attribute of a parameter


@dataclass
class Gate:
    """A named check that must pass before training."""

    id: str
    rows: str
    title: str
    check: Callable[["GateContext"], Finding]
    reads: tuple[str, ...] = PARTS
    """Parts of a recipe that can change the verdict."""
    lasting: bool = True
    """Whether a pass may be remembered. Gates that read the data report run every time, because each run makes it
    again."""
    symptom: bool = False
    """Whether many causes lead to its failure. The runner then runs the gates with `explains` before it prints the failure."""
    explains: bool = False
    """Whether it compares with an independent formula or definition, so that its failure names a cause."""
    compares_loss: bool = False
    """Whether it compares the loss, so that `initial-loss` leaves a loss of another form to it."""
    compares_ranks: bool = False
    """Whether it compares the processes of a training, or what they exchange, so that all of them must run it together."""


def gate(
    id: str, *, rows: str, title: str, reads: str = " ".join(PARTS), lasting: bool = True, symptom: bool = False,
    explains: bool = False, compares_loss: bool = False, compares_ranks: bool = False,
) -> Callable[[Callable[["GateContext"], Finding]], Gate]:  # fmt: skip
    """Turn a function into a gate. `reads` lists the parts of a recipe that the gate uses (default: all, so that none
    is forgotten). `frozen_modules` belong to the loss and to the evaluation, so they are added with either."""
    parts = reads.split()
    if {"loss", "evaluate"} & {*parts} and "frozen_modules" not in parts:
        parts.append("frozen_modules")
    return lambda check: Gate(
        id, rows, title, check, tuple(parts), lasting, symptom, explains, compares_loss, compares_ranks
    )


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
    failed: list[str] = field(default_factory=list)
    """Gates that have failed in this process, in the order they ran. A gate need not take minutes to say the same again."""
    memo: dict[str, Any] = field(default_factory=dict)
    here: set[str] = field(default_factory=set)
    """Entries of `memo` whose weights are on the device."""
    frozen: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    """Frozen weights by module and name, which all builds share (`share`)."""

    def build(self, plan: Rehearsal, cfg: config.Config | None = None) -> tuple[Run, Stage]:
        """Build a run and a stage as the full run will, or by other settings; frozen weights are in memory once for all builds."""
        run = Run(cfg or self.cfg, self.accelerator, rehearsal=plan)
        stage = build(run, self.make)
        if run.shard == shard.NONE:
            share(stage, self.frozen)
        return run, stage

    def look(self) -> tuple[Run, Stage]:
        """Return a run and a stage for inspection, built once for all gates. No gate may train, change or evaluate it
        with gradients."""
        return self.once("look", lambda: self.build(Rehearsal(steps=1)))

    @property
    def expect(self) -> Expect:
        """`Stage.expect` of a fresh stage."""
        return self.peek().expect

    def peek(self) -> Stage:
        """Return the stage of `look` for everything but its weights, which may be on the host."""
        return self.memo["look"][1] if "look" in self.memo else self.look()[1]

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once for all gates. A stage in it is not trained any more. While `make` works,
        the stages that this gate has asked for already are on the host."""
        if key not in self.memo:
            asked_for = [*self.here]
            self.put_away()
            try:
                self.memo[key] = make()
                for stage in _stages(self.memo[key]):
                    release(stage)
            finally:
                for earlier in asked_for:
                    self._fetch(earlier)
        self._fetch(key)
        return self.memo[key]

    def _fetch(self, key: str) -> None:
        self.here.add(key)
        for stage in _stages(self.memo[key]):
            move(stage, self.accelerator.device)

    def put_away(self) -> None:
        """Keep the weights of the stages that gates share on the host until a gate asks for them. Called before each
        gate."""
        self.here.clear()
        for made in self.memo.values():
            for stage in _stages(made):
                move(stage, HOST)


Proof = GateContext  # its name in 0.2: gates of forks may import it


def _stages(made: Any) -> list[Stage]:
    parts = made if isinstance(made, tuple) else (getattr(made, "stage", None),)
    return [part for part in parts if isinstance(part, Stage)]


def move(stage: Stage, device: torch.device) -> None:
    """Move the weights of a stage, their average, and the `net` of an object in `stage.state` (a target network).
    Quantised weights (integers) stay where they are, and so do frozen weights that all builds share."""
    for net in changing_models(stage):
        every = [*net.parameters()]
        own = [p for p in every if not hasattr(p, SHARED)]
        if all(p.device == device for p in own) or not all(p.is_floating_point() for p in every):
            continue
        if len(own) == len(every):
            net.to(device)
            continue
        for p in own:
            p.data = p.data.to(device)
        for module in net.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else buffer.to(device)


def changing_models(stage: Stage) -> list[nn.Module]:
    """Return the models of a stage that change in training."""
    others = (getattr(one, "net", None) for one in stage.state.values())
    return [stage.model, stage.eval_model, *(net for net in others if isinstance(net, nn.Module)), *stage.copies]


def share(stage: Stage, known: dict[tuple[str, str], torch.Tensor]) -> None:
    """Let frozen weights (`frozen_modules`, and those of the model that are declared frozen) and `pretrained` use the
    memory of an earlier build's, so that a base under adapters, a teacher or a reference is in memory once. Only
    bitwise equal weights are shared; others keep their own memory. `wiring` checks that training does not write to them."""

    def kind(t: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
        return t.shape, t.dtype, t.device

    def first(module: str, name: str, mine: torch.Tensor) -> torch.Tensor:
        there = known.get((module, name))
        if there is mine:
            return mine
        with contextlib.suppress(RuntimeError):  # types of 8 bits cannot be compared
            if there is not None and kind(there) == kind(mine) and torch.equal(there, mine):
                return there
        known[module, name] = mine
        return mine

    if stage.pretrained is not None:
        stage.pretrained = {n: first("pretrained", n, t) for n, t in stage.pretrained.items()}
    trained = {id(p) for p in stage.parameters().values()}
    declared = stage.expect.frozen
    names = [("model", n, p) for n, p in stage.model.named_parameters() if n.startswith(declared)]
    names += [(k, n, p) for k, module in stage.frozen_modules.items() for n, p in module.named_parameters()]
    every = (m for one in (stage.model, *stage.frozen_modules.values()) for m in one.modules())
    if any(isinstance(m, nn.RNNBase) for m in every):
        return  # its kernels want the weights in one piece
    for module, name, p in names:
        if id(p) in trained or hasattr(p, SHARED) or not p.is_floating_point() or type(p.data) is not torch.Tensor:
            continue
        p.data = first(module, name, p.data)
        setattr(p, SHARED, True)


def unshare(net: nn.Module) -> None:
    """Give shared frozen weights memory of their own, before a gate writes to every parameter."""
    for p in net.parameters():
        if hasattr(p, SHARED):
            p.data = p.data.clone()
            delattr(p, SHARED)


def release(stage: Stage) -> None:
    """Drop what only training needs of a stage that gates keep: gradients, the optimisers' state (with AdamW three
    times its trained weights), and what an object in `stage.state` drops itself by `release()` (a replay buffer)."""
    for optimizer in stage.optimizers.values():
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            parameter.grad = None
        if isinstance(state := getattr(optimizer, "state", None), dict):
            state.clear()
    for one in stage.state.values():
        if callable(drop := getattr(one, "release", None)):
            drop()
    stage.wrapped = None  # with several processes, the buckets of its gradients


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside, because scanning them takes a third of a second and `build` collects
    every time. Afterwards, nothing of the gates is alive."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def build(run: Run, make: Callable[[Run], Stage]) -> Stage:
    """Build a stage from the run's seed alone, on the run's device, sharded if the run is. Before that, collect
    garbage: closures that refer to their run or stage keep earlier stages alive in reference cycles."""
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
    if run.rehearsal is None:  # the full run: free the memory of what only gates use
        stage.pretrained = None
        read_weights.cache_clear()
    for module in stage.frozen_modules.values():
        module.eval().requires_grad_(False)
    if run.cfg.train.gradient_checkpointing:
        gradient_checkpointing.apply(stage)
    if run.shard != shard.NONE:
        shard.apply(stage, run)
    for module in (stage.model, stage.eval_model, *stage.frozen_modules.values()):
        module.to(run.device)
    return stage


def pick(data: Data, n: int, seed: int, *, only: Collection[int] | None = None) -> list[int]:
    """Return indices of `n` samples, in turn from each class of a categorical target (only from classes in `only`, if
    given), else at random; of texts, those with different targets first."""
    order = data.order(seed, "pick").tolist()
    key = categorical(data)
    if key is None:
        return _different(data, order, n)
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


def _different(data: Data, order: list[int], n: int) -> list[int]:
    """Return the first `n` of `order`; samples that repeat a target text come last, because equal answers say nothing about the
    inputs."""
    name = next((k for k, f in data.fields.items() if f.role == "target"), None)
    if name is None or not order or not isinstance(data.peek(order[0], name), str):
        return order[:n]
    seen: set[str] = set()
    own, again = [], []
    for i in order[: 8 * n]:
        text = data.peek(i, name)
        (again if text in seen else own).append(i)
        seen.add(text)
    return (own + again)[:n]


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


def own_size(of: "GateContext | Run") -> int:
    """Return the samples in a micro-batch of the full run, on one process."""
    return max(1, -(-of.cfg.train.batch_size // (of.accelerator.num_processes * of.cfg.train.accumulate)))


def micro_batch_sizes(context: GateContext, size: int) -> list[int] | None:
    """Return the sizes of each process's micro-batches in a rehearsed step of `size` samples. Return None if the run's own number of
    micro-batches keeps each of them no larger than the run's, and for a user's own loop or trainer: there, a loss that is no sum over
    samples (that of some transformers classifiers) depends on the number of micro-batches."""
    if not context.sized:
        return None
    (mine, rest), own = divmod(size, context.accelerator.num_processes), own_size(context)
    if rest or mine <= own * context.cfg.train.accumulate or "train" not in context.peek().data:
        return None
    return cut(mine, -(-mine // own))


def split_evenly(indices: list[Item], most: int) -> list[list[Item]]:
    """Divide samples into pieces of at most `most`, as equal as possible."""
    ends, found = 0, []
    for size in cut(len(indices), -(-len(indices) // most)):
        found.append(indices[ends : ends + size])
        ends += size
    return found


def total_loss(run: Run, stage: Stage, *batches: dict) -> torch.Tensor:
    """Return the mean loss of a batch on this process: each term's sum over its denominator, in the run's precision.
    Several batches are the micro-batches of one batch; their graphs are then recomputed in the backward pass, to save memory."""
    counts = summed([stage.counts(batch) for batch in batches])
    again = len(batches) > 1 and torch.is_grad_enabled()
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        with run.autocast():
            loss = functools.partial(checkpoint, stage.loss, use_reentrant=False) if again else stage.loss
            terms = loss(stage.model, batch)
        sums = {t: s if t not in sums else sums[t] + s for t, s in terms.items()}
    return functools.reduce(torch.add, (s / denominator(t, counts) for t, s in sums.items()))


def loss_of_parts(run: Run, stage: Stage, read: Callable[[list[int]], dict], parts: list[list[int]]) -> float:
    """Return the mean loss of a batch that is read in parts, of which one at a time is in memory: first for the denominators,
    then for the loss."""
    if len(parts) == 1:
        return total_loss(run, stage, read(parts[0])).item()
    counts = summed([stage.counts(read(part)) for part in parts])
    total = 0.0
    for part in parts:
        with run.autocast():
            terms = stage.loss(stage.model, read(part))
        total += sum((s / denominator(t, counts)).item() for t, s in terms.items())
    return total
