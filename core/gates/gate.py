"""What a gate is: a function from `Proof` to `Finding`, with a name. It builds its own stage and throws it away."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from trainworthy.core.base import config, seeds
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data import inventory
from trainworthy.core.data.loader import Keyed, to_device
from trainworthy.core.loop.init_from import read_weights, start_from
from trainworthy.core.loop.run import Plan, Run, denominator
from trainworthy.core.recipe.stage import PARTS, Data, Expect, Stage
from trainworthy.core.recipe.stage import categorical as categorical


@dataclass
class Gate:
    """A named proof."""

    id: str
    rows: str
    title: str
    prove: Callable[["Proof"], Finding]
    reads: tuple[str, ...] = PARTS
    """Parts of a recipe whose change it may see."""
    lasting: bool = True
    """May a pass be remembered? What judges the data report, which every run makes anew, is judged anew."""


def gate(
    id: str, *, rows: str, title: str, reads: str = " ".join(PARTS), lasting: bool = True
) -> Callable[[Callable[["Proof"], Finding]], Gate]:
    """Make a function a gate. `reads`: parts of a recipe that it looks at; every part unless said, so that none is forgotten. What
    stands beside the model is a part of its loss and of its evaluation."""
    parts = reads.split()
    if {"loss", "evaluate"} & {*parts} and "frozen_modules" not in parts:
        parts.append("frozen_modules")
    return lambda prove: Gate(id, rows, title, prove, tuple(parts), lasting)


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
        if stage.ema_model is not None:  # it was copied from the model before that
            stage.ema_model.load_state_dict(stage.model.state_dict())
    if stage.on_start:
        stage.on_start()
    if run.plan is None:  # the full run: what only gates compare with is not held in memory
        stage.pretrained = None
        read_weights.cache_clear()
    stage.model.to(run.device)
    stage.eval_model.to(run.device)
    for module in stage.frozen_modules.values():
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


def fetch(data: Data, indices: list[int], generator_seed: int | None, device: torch.device) -> dict:
    """A collated batch of samples on the training path (fixed draws) or, with None, on the evaluation path."""
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
