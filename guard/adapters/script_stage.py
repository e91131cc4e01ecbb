"""The stage that gates see of a plain script: its data, loss, metric, loop and checkpoint as a recipe has them."""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset
from trainworthy.core.base import config, seeds
from trainworthy.core.base.errors import UserError
from trainworthy.core.data.loader import to_device
from trainworthy.core.gates.causes.frozen import STATISTICS
from trainworthy.core.loop.run import Run, Step
from trainworthy.core.recipe.stage import Data, Expect, Field, Metric, Stage, View, batch_size
from trainworthy.guard.adapters.entries import Plain, Samples, chance, classes, fields, samples
from trainworthy.guard.adapters.next_token import reachable
from trainworthy.guard.adapters.objective import Objective, recognise
from trainworthy.guard.adapters.one_cycle import keep_last_rate
from trainworthy.guard.measures.rates import highest

MOST = 0.9  # of the trained weights: a copy of less is a layer like another
FEW = 32  # samples whose targets are exchanged
LOW = 0.5  # of the base rate: there is a warm-up, or the factor is the rate itself
SHOWN = 256  # validation samples per evaluation when rehearsing a script's own loop


@dataclass(kw_only=True)
class Script:
    """The parts of a training script. The factory builds a new one at every call; only data may be shared."""

    model: nn.Module
    optimizer: Optimizer
    train: Dataset | DataLoader
    """Map-style data set with the training augmentation. From a loader, core takes data set, batch size and collate."""
    val: Dataset | DataLoader
    """Map-style data set as it is evaluated."""
    loss: Callable[[nn.Module, Any], Tensor]
    """(model, batch) -> the MEAN over the batch, as `F.cross_entropy` returns it; the loop calls backward on it."""
    metric: Callable[[nn.Module, DataLoader], float]
    """(model, loader) -> the number that the script reports; it calls model.eval() itself."""
    train_loop: Callable[[nn.Module, Optimizer, Iterable], Any] | None = None
    """(model, optimizer, batches): the script's own loop over the `batches` between two validations. Without it core's
    loop trains, and faults in the script's loop stay hidden."""
    accumulate: int = 1
    """Batches over which `train_loop` accumulates gradients before a step: 1, 2, 4 or 8."""
    save: Callable[[Path], Any] | None = None
    load: Callable[[Path], Any] | None = None
    """(path): loads the script's own checkpoint into this model and optimiser."""
    target: str | int | None = None
    """Entry of a sample to predict. Default: the second of a pair. All other entries are inputs."""
    classes: int | Sequence[str] | None = None
    """Number or names of a categorical target's values."""
    fields: dict[str, Field] | None = None
    """Full description of each entry (ranges, groups), instead of `target` and `classes`. Positions are named "0", "1",
    ..."""
    count: Callable[[Any], float] | None = None
    """batch -> what the mean is over (scored tokens). Default: samples."""
    collate: Callable[[list], Any] | None = None
    batch_size: int = 32
    higher_is_better: bool = True
    floor: float | None = None
    """Chance level. Default: 1 / classes, or 0. If lower is better, it must be set (MSE: the variance)."""
    ceiling: float | None = None
    """Score of a perfect model. Default: 1, or 0 if lower is better."""
    initial_loss: float | None = None
    """Loss of the untrained model, if theory gives it (ln of the number of classes)."""
    loss_floor: float = 0.0
    """Lowest loss that the objective allows (label smoothing)."""
    overfit_steps: int = 500
    """Steps within which the model must memorise eight fixed samples."""
    frozen: tuple[str, ...] = ()
    """Name prefixes of parameters that are frozen on purpose."""
    batch_dependence: str = ""
    """Reason why samples of a batch influence each other (contrastive loss). Leave empty if they must not."""


@dataclass
class _ScriptStage(Stage):
    script: Script = field(kw_only=True)

    def follows(self, name: str) -> bool:
        """Statistics of batch norm, which move in every training that does not stop them (in a frozen base, too), and a copy of what trains,
        an average of its weights. A copy that is declared frozen is a reference: nothing of it may move."""
        if name.startswith(self._copies):
            return not name.startswith(self.expect.frozen)
        return name.rpartition(".")[2] in STATISTICS

    @cached_property
    def _copies(self) -> tuple[str, ...]:
        """Prefixes of modules without trained parameters that have, by name and shape, those of a trained one that is most of the model."""
        trained = self.parameters()
        most = MOST * sum(p.numel() for p in trained.values())
        kinds: dict[bool, dict[str, tuple]] = {True: {}, False: {}}  # all of its parameters train, or none -> modules
        for prefix, module in self.model.named_modules():
            mine = module.module if isinstance(module, AveragedModel) else module  # which has a counter, too
            trains = {n in trained for n, _ in module.named_parameters(prefix=prefix)}
            if len(trains) == 1 and sum(p.numel() for p in mine.parameters()) >= most:
                kinds[trains.pop()][f"{prefix}."] = tuple((n, p.shape) for n, p in mine.named_parameters())
        return tuple(prefix for prefix, kind in kinds[False].items() if kind in kinds[True].values())

    def samples(self, split: str) -> Samples:
        """One of its data sets, of the only type that it has."""
        return cast(Samples, self.data[split])


class _Pairing:
    """Matches optimiser steps with batches: a step uses the oldest batches that were not used before. A loop may
    request batches early (a prefetch, a list), so the newest need not be its own."""

    def __init__(self, run: Run, stage: _ScriptStage):
        self._run, self._stage = run, stage
        self.given: list[Step] = []
        self.done, self.passes, self.lists = 0, 0, False

    def start(self) -> None:
        """Begin a pass over the batches."""
        self.given, self.done = [], 0
        self.passes += 1

    def hand(self, step: Step) -> None:
        """Record that the batches of `step` were yielded."""
        self.given.append(step)
        self._point()

    def stepped(self, *_: Any) -> None:
        """Record an optimiser step."""
        self.done += 1
        self._point()

    def _point(self) -> None:
        if self.done < len(self.given):
            step = self.given[self.done]
            self._run.current, self._run.step = step, step.index
            seeds.seed_global(self._run.cfg.run.seed, "model", step.index, self._run.rank)

    def look(self) -> None:
        """Find out whether the loop collects its batches in a list. Then it gets them one by one, because gates observe
        between steps."""
        waits = len(self.given) - self.done >= 3
        if waits and not self.lists:
            grads = [p.grad for p in self._stage.model.parameters() if p.grad is not None]
            self.lists = self.done == 0 and not any(g.any() for g in grads)  # else it accumulates gradients


class _Batches:
    """The batches up to the next validation: one pass of the script's loop."""

    def __init__(self, run: Run, stage: _ScriptStage, steps: Iterator, pairing: _Pairing):
        self._stage, self._steps, self._pairing = stage, steps, pairing
        self.dataset = stage.samples("train").dataset
        self.used = self.over = self.due = False
        self._length = max(1, (run.total_steps(stage) - run.step) * stage.script.accumulate)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for step in self._steps:
            self.used = True
            self._pairing.hand(step)
            yield from map(self._stage.samples("train").batch, step.batches)
            self.due = step.due(1)
            self._pairing.look()
            if self.due or self._pairing.lists:
                return
        self.over = True


def train(cfg: config.Config, run: Run, stage: _ScriptStage) -> None:
    """Run the script's own loop with core's steps; without one, core's loop."""
    script = stage.script
    if script.train_loop is None:
        for step in run.steps(stage):
            run.update(stage, step.batches)
        return
    val, steps, pairing = stage.data["val"], run.steps(stage), _Pairing(run, stage)
    preview = View(val, range(min(SHOWN, len(val))))
    epoch = len(stage.samples("train").dataset) // (cfg.train.batch_size * script.accumulate)
    with keep_last_rate(epoch, lambda: pairing.passes), script.optimizer.register_step_post_hook(pairing.stepped):
        while True:
            pairing.start()
            batches = _Batches(run, stage, steps, pairing)
            script.train_loop(script.model, script.optimizer, batches)
            if batches.over or not batches.used:
                return
            if batches.due:
                with torch.no_grad():  # as the script does after its pass; keep the mode that this leaves
                    script.metric(script.model, _loader(cfg, stage, preview))


def _loader(cfg: config.Config, stage: _ScriptStage, data: Data) -> DataLoader:
    own = stage.samples("val")
    return DataLoader(Plain(data, own.row), batch_size=cfg.train.eval_batch_size, collate_fn=own.own_collate)


def fresh(one: Script, two: Script) -> Script:
    """Return one script, after checking that two calls share nothing trainable."""
    if not isinstance(one, Script):
        what = "the factory must return a trainworthy.Script, a trainworthy.Loop or a transformers Trainer"
        raise UserError(what, got=type(one).__name__)
    if {id(p) for p in one.model.parameters()} & {id(p) for p in two.model.parameters()}:
        raise UserError("the factory returns the same model twice", needed="a new model and a new optimiser at every call",
                        cause="the model is built outside the factory")  # fmt: skip
    if one.accumulate not in (1, 2, 4, 8):
        raise UserError("accumulate cannot be rehearsed on 8 and 16 samples", got=one.accumulate, needed="1, 2, 4 or 8")
    if (one.save is None) != (one.load is None):
        raise UserError("save and load belong together", got="one of them")
    if not one.higher_is_better and one.floor is None:
        needed = "floor=the score of a constant answer (MSE: the variance of the targets)"
        raise UserError("the metric has no floor", needed=needed)
    return one


def settings(script: Script, seed: int) -> config.Config:
    size = script.train.batch_size if isinstance(script.train, DataLoader) else script.batch_size
    return config.Config(
        train=config.Train(batch_size=max(size or 1, script.accumulate), accumulate=script.accumulate),
        optim=config.Optim(clip=float("inf"), schedule="constant", warmup=0.0, lr=max(peaks(script.optimizer))),
        run=config.RunSettings(seed=seed),
    )  # fmt: skip


def objective(script: Script) -> Objective:
    """Find label smoothing and class weights of the script's loss, if it does not declare what its loss is a mean
    over."""
    data = samples(script, script.train, fixed=True)
    key = next((k for k, f in fields(script, data).items() if f.role == "target"), None)
    if key is None or script.count or script.loss_floor:
        return Objective()
    device = next(script.model.parameters()).device
    chosen, pairs = data.representative(min(len(data), 256)), []
    for at in range(0, len(chosen), 64):
        named = to_device(data.collate([data.get(i, None) for i in chosen[at : at + 64]]), device)
        if not isinstance(labels := named.get(key), Tensor) or labels.dim() != 1 or labels.is_floating_point():
            return Objective()
        pairs.append((data.batch(named), labels))
    return recognise(script.loss, pairs, script.model)


def self_supervised(script: Script) -> bool:
    """Return whether neither loss nor metric depends on a target besides the input, as in an autoencoder."""
    try:
        data = samples(script, script.train, fixed=True)
        key = next((k for k, f in fields(script, data).items() if f.role == "target"), None)
        if key is None:
            return True
        device = next(script.model.parameters()).device

        def exchanged(n: int) -> Iterator[list]:
            got = [data.get(i, None) for i in data.representative(min(len(data), n))]
            for shift in (0, 1, 2):  # each sample with another one's target
                seeds.seed_all(0)
                yield [data.row({**a, key: b[key]}) for a, b in zip(got, got[shift:] + got[:shift], strict=True)]

        def loss(rows: list) -> float:
            script.model.eval()
            batch = to_device(data.entries(data.own_collate(rows)), device)
            with torch.no_grad():
                return float(script.loss(script.model, data.batch(batch)))

        def score(rows: list) -> float:
            return float(script.metric(script.model, DataLoader(rows, 64, collate_fn=data.own_collate)))  # type: ignore[arg-type]

        return len(set(map(loss, exchanged(FEW)))) == 1 and len(set(map(score, exchanged(SHOWN)))) == 1
    except Exception:  # a metric or a loss that needs more: the gates say so
        return False


def make_stage(factory: Callable[[], Script], folder: Path, found: Objective, run: Run) -> _ScriptStage:
    seeds.seed_all(seeds.derive(run.cfg.run.seed, "build"))
    script = factory()
    for group, rate in zip(script.optimizer.param_groups, peaks(script.optimizer), strict=True):
        group["peak_lr"] = rate
        group["params"] = [p for p in group["params"] if p.requires_grad]  # torch skips the others
    data = {"train": samples(script, script.train, fixed=True), "val": samples(script, script.val, fixed=False)}
    for one in data.values():
        one.fields = fields(script, one)
    count, batch = script.count, data["train"].batch
    key = next((k for k, f in data["train"].fields.items() if f.role == "target"), "")

    def counts(named: dict) -> dict[str, float]:
        if count is None and found.weights:
            return {"loss": sum(found.weights.get(y, 1.0) for y in named[key].tolist())}
        return {"loss": count(batch(named)) if count else batch_size(named)}

    def loss(model: nn.Module, named: dict) -> dict[str, Tensor]:
        return {"loss": script.loss(model, batch(named)) * counts(named)["loss"]}

    def evaluate(model: nn.Module, chosen: Data) -> dict[str, float]:
        model.train()  # as the loop leaves it: the metric must set eval mode itself
        return {name: float(script.metric(model, _loader(run.cfg, stage, chosen)))}

    name = getattr(script.metric, "__name__", "metric").replace("<lambda>", "metric")
    guess = 1 / len(names) if (names := classes(script)) else chance(data["train"])
    floor = guess if script.floor is None else script.floor
    ceiling = float(script.higher_is_better) if script.ceiling is None else script.ceiling
    lowest, goal = reachable(script, data["train"], script.loss_floor or found.floor, floor, ceiling, found.own_target)
    stage = _ScriptStage(
        name="script", model=script.model, optimizers={"main": script.optimizer}, data=data, loss=loss, evaluate=evaluate,
        metric=Metric(name, "", floor=floor, ceiling=ceiling, higher_is_better=script.higher_is_better), counts=counts,
        expect=Expect(initial_loss=script.initial_loss, loss_floor=lowest, floor_known=not found.own_target,
                      overfit_steps=script.overfit_steps, overfit_longer=True,
                      overfit_metric=goal, frozen=tuple(script.frozen), batch_dependence=script.batch_dependence,
                      schedule="train_loop is the script's own" if script.train_loop else ""),
        state={"checkpoint": _OwnCheckpoint(script, folder)} if script.save else {}, script=script,
    )  # fmt: skip
    return stage


class _OwnCheckpoint:
    """Uses the script's save and load instead of core's: what core restored is undone before `load` runs."""

    def __init__(self, script: Script, folder: Path):
        self.script, self.folder = script, folder
        self._fresh = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))

    def state_dict(self) -> dict[str, str]:
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="checkpoint-", delete=False) as file:
            self.script.save(Path(file.name))  # type: ignore[misc]  # only made if there is one
        return {"path": file.name}

    def load_state_dict(self, state: dict[str, str]) -> None:
        model, optimizer = self._fresh
        self.script.model.load_state_dict(model)
        self.script.optimizer.load_state_dict(optimizer)
        self.script.load(Path(state["path"]))  # type: ignore[misc]  # given with `save`


def peaks(optimizer: Optimizer) -> list[float]:
    """Return the highest rate of each parameter group. torch's schedulers store it; the current rate may be 0 in a warmup. The factor of a
    LambdaLR may be the rate itself (Vaswani et al. 2017), for a base rate of 1."""
    stored = [max(group.get("initial_lr", 0.0), group.get("max_lr", 0.0)) for group in optimizer.param_groups]
    rates = [group["lr"] for group in optimizer.param_groups]
    if rates[0] < LOW * stored[0]:
        own = (o for o in gc.get_objects() if issubclass(type(o), LambdaLR) and o.optimizer is optimizer)
        factor = max((highest(f) for one in own for f in one.lr_lambdas), default=1.0)
        stored = [factor * rate for rate in stored]
    return list(map(max, rates, stored))
