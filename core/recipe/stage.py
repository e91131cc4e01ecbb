"""What core and its gates touch of a recipe: a `Stage` and the `Data` it reads. A recipe fills these and shows its loop."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate
from trainworthy.core.base import seeds


@dataclass
class Field:
    """What one entry of a sample is, so that data can be counted, checked for leaks and blanked without knowing the domain."""

    role: str
    """`input` (what the model reads), `target` (what it must predict), `group` (ids that must not be on both sides of a split),
    `source` (what inputs are drawn from, where they are: the clean picture under the noise, the whole text of a crop; splits are
    compared by it instead of by their inputs)."""
    classes: Sequence[str] | None = None
    """Names of a categorical target's values, by index."""
    low: float | None = None
    high: float | None = None
    """Valid range of the values, both ends included."""
    fabricated: Callable[[dict[str, Any]], float] | None = None
    """sample -> share (0 to 1) of this entry that was not measured: interpolated, padded, resampled, synthetic. The sample is what
    `get` returns, so a data set that knows it hands it along: `lambda s: s["padded"]`. It is counted, reported, and must not give
    the target away."""


class Data:
    """A map-style data set whose every random draw comes from the generator it is handed.

    `fields` names the entries of a sample. Subclasses give `__len__` and `get`.
    """

    fields: dict[str, Field]
    notes: Mapping[str, str] = MappingProxyType({})
    """What the data report and the card say of this set beyond its numbers: what was left out, what converted."""

    def __len__(self) -> int:
        raise NotImplementedError

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        """Sample `index`. With a generator: the training path, augmented by draws from it (or from torch's global generator,
        which is seeded the same). With None: the evaluation path, no randomness at all."""
        raise NotImplementedError

    def read(self, index: int) -> Any:
        """What sample `index` must wait for (its file), as `make` takes it. With `--loader.threads` it is called in threads, many
        at once and ahead of time: nothing is drawn and nothing changed here. Default: nothing."""
        return None

    def make(self, index: int, got: Any, generator: torch.Generator | None) -> dict[str, Any]:
        """Sample `index` of what `read` returned. Whoever writes both writes `get` as `make(index, read(index), generator)`."""
        return self.get(index, generator)

    def peek(self, index: int, key: str) -> Any:
        """One entry of a sample on the evaluation path; worth overriding where a target can be had without reading its input."""
        return self.get(index, None)[key]

    def identity(self, index: int) -> bytes | str | None:
        """What sample `index` is told apart by without decoding it: the raw record that its inputs are made from (the bytes of its
        file), or a hash of that which is known already. With it exact duplicates are found over all samples, however many there
        are; called in threads. None: the fields that `get` returns are hashed, of all samples where that takes seconds."""
        return None

    def source_class(self, index: int) -> str | None:
        """What the sample's source calls its class (the name of its folder), read without its label; None: it does not say."""
        return None

    def order(self, *parts: int | str) -> Tensor:
        """A permutation (n,) of the samples that depends on `parts` alone; worth overriding where far jumps are dear."""
        return seeds.permutation(len(self), *parts)

    def representative(self, count: int) -> Sequence[int]:
        """`count` samples that stand for all where not all are read, evenly spaced; worth overriding where far jumps are dear."""
        return [i * len(self) // count for i in range(count)]

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Samples to a batch; tensors are stacked along a new first axis."""
        return default_collate(samples)


@dataclass
class View(Data):
    """Some samples of another data set, or the same samples with one entry replaced; gates use it."""

    data: Data
    indices: Sequence[int]
    blank: tuple[str, ...] = ()
    """Fields replaced by zeros, texts by nothing."""
    swap: Sequence[int] | None = None
    """Positions (into `indices`) whose input fields each sample gets instead of its own."""
    relabel: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """{categorical target: {class: the class it is called instead}}."""
    draws: int | None = None
    """Seed: the evaluation path then sees the training path's samples, with the draws of epoch 0."""

    def __post_init__(self):
        self.fields = self.data.fields

    def __len__(self) -> int:
        return len(self.indices)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        return self.make(index, self.read(index), generator)

    def read(self, index: int) -> Any:
        return self.data.read(self.indices[index])

    def make(self, index: int, got: Any, generator: torch.Generator | None) -> dict[str, Any]:
        sample = self._made(index, got, generator)
        if self.swap is not None:
            other = self._made(self.swap[index], self.read(self.swap[index]), generator)
            sample = {**sample, **{k: other[k] for k, f in self.fields.items() if f.role == "input"}}
        for key, classes in self.relabel.items():
            was, new = sample[key], classes[int(sample[key])]
            sample = {**sample, key: torch.full_like(was, new) if isinstance(was, Tensor) else type(was)(new)}
        return {k: _blank(v) if k in self.blank else v for k, v in sample.items()}

    def _made(self, index: int, got: Any, generator: torch.Generator | None) -> dict[str, Any]:
        if self.draws is not None and generator is None:
            generator = seeds.seed_sample(self.draws, "sample", 0, index)
        return self.data.make(self.indices[index], got, generator)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return self.data.collate(samples)


def categorical(data: Data) -> str | None:
    """Name of the first target that is a class, if there is one."""
    return next((k for k, f in data.fields.items() if f.role == "target" and f.classes), None)


def _blank(value: Any) -> Any:
    return "" if isinstance(value, str) else torch.zeros_like(torch.as_tensor(value))


@dataclass
class Metric:
    """What the best checkpoint is chosen by, and the question it answers."""

    name: str
    """Key in what `evaluate` returns."""
    question: str
    floor: float
    """What knowing nothing scores (chance)."""
    ceiling: float
    """What a perfect model scores."""
    higher_is_better: bool = True
    best_known: str = ""
    """The best result known for this task and data, with its source."""

    def better(self, a: float, b: float) -> bool:
        """Is `a` strictly better than `b`?"""
        return a > b if self.higher_is_better else a < b


@dataclass
class Probe:
    """What gates judge by that train for seconds, where the stage's metric says something after a whole run only (the samples of a
    generator): another metric, and its evaluation."""

    metric: Metric
    evaluate: Callable[[nn.Module, Data], dict[str, float]]


@dataclass
class Expect:
    """What a healthy recipe does, where theory or measurement says so. A gate without its expectation skips and says so."""

    initial_loss: float | Callable[[dict], float] | None = None
    """Loss per sample of the untrained model (softmax over N balanced classes: ln N); a function of the batch where draws decide it
    (noise levels that weigh differently)."""
    loss_floor: float | Callable[[dict], float] = 0.0
    """Lowest loss the objective allows on the overfit batch (label smoothing's entropy); a function of the batch where draws
    decide it (mixup)."""
    overfit_steps: int = 120
    """Steps within which eight fixed samples must be learnt."""
    gate_batch_size: int = 0
    """Where a sample costs a good part of a second: how many of them a gate's step has at most (twice as many are overfit,
    cut and evaluated, four times as many read over and over). Below 8 the range test, and tiny-data always, are left to
    `check --deep`. 0: the gates' own numbers."""
    overfit_metric: float | Callable[[dict], float] | None = None
    """Value of the metric that the overfit batch must reach through the real evaluation (default: its ceiling)."""
    frozen: tuple[str, ...] = ()
    """Prefixes of parameter names of the stage's `model` that are frozen on purpose."""
    no_gradient: tuple[str, ...] = ()
    """Prefixes of trainable parameters that may stay without a gradient for a few steps (an unused head, an idle expert)."""
    new_parameters: tuple[str, ...] = ()
    """Prefixes of parameters that are new on purpose when a stage starts from pretrained weights (another task's head)."""
    couplings: str = ""
    """Why samples of a batch legitimately influence each other (contrastive loss); empty: they must not."""
    random_loss: str = ""
    """Why two forwards of one batch under one seed may differ; empty: they must not."""
    nondeterministic: str = ""
    """Why two runs of one seed may differ (an environment that draws from a generator of its own); empty: they must not."""
    schedule: str = ""
    """Why the rates are not those of `--optim.schedule` or an optimiser does not step once per unit (an own schedule, a rollout
    with its epochs); empty: they are, and it does."""
    solvable_without_input: str = ""
    """Why a few samples may be answered without their inputs (which of two given answers is preferred); empty: they may not."""
    range_test: str = ""
    """Why no band of usable rates can be measured on one batch (DPO, reinforcement learning); empty: it can."""
    sampling: str = ""
    """Why a sample may come twice in an epoch or the order stay the same (drawn with replacement, a curriculum, rollouts);
    empty: every sample once an epoch, in another order each time."""
    small_terms: tuple[str, ...] = ()
    """Loss terms that may carry next to nothing of the gradient (a regulariser near its optimum)."""
    loss_may_rise: str = ""
    """Why the loss says nothing about progress (targets that move with the policy); empty: a lower one is better."""

    def at_most(self, n: int, *, times: int = 1) -> int:
        """`n` samples, or as many as can be afforded."""
        return min(n, times * self.gate_batch_size) if self.gate_batch_size else n


@dataclass
class Tile:
    """One thing to look at: its caption, a picture, and for a prediction how good it is in [0, 1]."""

    caption: str
    image: Tensor | None = None
    """(H, W) or (H, W, 3) uint8; or as nets read pictures, (C, H, W) floats in [0, 1], which are then rounded to that."""
    good: float | None = None

    def __post_init__(self):
        if self.image is not None and self.image.is_floating_point():
            shown = (self.image.detach().cpu() * 255).round().clamp(0, 255).to(torch.uint8)
            shown = shown.permute(1, 2, 0)  # (H, W, C)
            self.image = shown.squeeze(-1) if shown.shape[-1] == 1 else shown


@dataclass
class Matrix:
    """A table of numbers to look at: (rows, columns), shaded by row."""

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    axes: tuple[str, str] = ("", "")


@dataclass
class Points:
    """Values over other values to look at, (N,) both: what no axis of steps or of classes holds."""

    x: Tensor
    y: Tensor
    axes: tuple[str, str]
    error: Tensor | None = None
    """Half the length of a bar through each point, (N,)."""
    diagonal: bool = False
    """Points belong on y = x."""
    note: str = ""
    named: dict[str, Tensor] = field(default_factory=dict)
    """Values (N,) to compare over the same x, by name: each a line, instead of the points."""


def batch_size(batch: dict[str, Any]) -> int:
    """Samples in a batch: the length of its first tensor."""
    return next(v.shape[0] for v in batch.values() if isinstance(v, Tensor))


@dataclass
class Stage:
    """One phase of training. Core wraps, counts, clips, saves and checks; the recipe says what and shows in which order."""

    name: str
    model: nn.Module
    """Bare. Parameters in no optimiser are frozen."""
    optimizers: dict[str, Optimizer]
    data: dict[str, Data]
    """`train`, `val`, and `test` where there is a part that no setting was chosen on: the reported weights are evaluated on it
    once, at the end of the run, and every choice stays with `val`.

    Without `train` the loop makes its own samples (a rollout in every unit of `run.steps`, say): an epoch is
    then one unit, and `--train.batch-size` the samples of one update."""
    loss: Callable[[nn.Module, dict], dict[str, Tensor]]
    """(model, batch) -> {term: SUM over the batch}; pure given the batch: every draw is already in it."""
    evaluate: Callable[[nn.Module, Data], dict[str, float]]
    """(model, data) -> metrics over all ranks, through the path the user's number comes from."""
    metric: Metric
    probe: Probe | None = None
    """Stands for `metric` and `evaluate` where a gate trains on a few samples; default: those themselves."""
    counts: Callable[[dict], dict[str, float]] = lambda batch: {"*": batch_size(batch)}
    """batch -> {term: denominator}, known BEFORE the forward; they are summed over the whole global batch. `"*"` stands for
    every term not named. Default: samples."""
    confusion: Callable[[nn.Module, Data], Tensor] | None = None
    """(model, data) -> (n, n) counts over all ranks, truth in rows: held-out classes that are called by each other's names are
    found by it."""
    ema_model: nn.Module | None = None
    """What is evaluated, kept as best and exported instead of `model`, where that is not the same (its EMA)."""
    state: dict[str, Any] = field(default_factory=dict)
    """Saved, not optimised: anything with state_dict() and load_state_dict() (EMA, normaliser, replay)."""
    on_start: Callable[[], None] | None = None
    """Called once `model` has the weights it starts from (`--init-from`) and before anything is learnt, to copy a reference."""
    frozen_modules: dict[str, nn.Module] = field(default_factory=dict)
    """What the stage works with and never trains (teacher, reference, reward model, judge): core puts it on the device, freezes it,
    sets it to eval mode; a gate sees it stay as it came, and a resumed run that it is the same. Not saved."""
    expect: Expect = field(default_factory=Expect)
    baselines: Callable[[], dict[str, dict[str, float]]] = dict
    """-> {baseline: metrics}, shown beside the result."""
    upper_bounds: tuple[str, ...] = ()
    """Names among the baselines that nobody is asked to beat (a teacher, real data)."""
    preview: Callable[[dict], list[Tile]] | None = None
    """batch -> what its tensors say, decoded back: what the net sees just before the net."""
    predict: Callable[[nn.Module, dict], list[Tile]] | None = None
    """(model, batch) -> the prediction for each sample."""
    figures: Callable[[nn.Module, Data], dict[str, Any]] | None = None
    """(model, data) -> {title: list of Tiles, a Matrix or Points} for the report."""
    pretrained: dict[str, Tensor] | None = None
    """The state dict that `model` was started from, names as in the file; `--init-from` fills it, a recipe that loads by
    itself says so here. A gate compares; it is dropped before the full run trains."""
    export: Callable[[Path], None] | None = None
    """Write what the ecosystem can load; default: model.safetensors."""
    exported: Any = None
    """How users read it (an `exported.Exported`): a gate and the end of a run load it in a fresh process and compare answers."""
    gates: list = field(default_factory=list)
    """The domain's own gates, beside the core's."""
    monitors: list = field(default_factory=list)
    """The domain's own monitors, beside the core's: what only the evaluations of a whole run can show."""

    wrapped = None
    """(model, the module whose forward is its loss), once it is trained; no field: a copy of the stage wraps its own model."""

    @property
    def eval_model(self) -> nn.Module:
        """The module whose answers count: the average where there is one, else the model."""
        return self.model if self.ema_model is None else self.ema_model

    @property
    def not_saved(self) -> set[str]:
        """Names of the parameters that no optimiser holds, and of what a state dict keeps under such a name (the scales of packed
        weights): they come from their own source again, and are not saved."""
        trained = {id(p) for p in self.parameters().values()}
        names = {n for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) not in trained}
        under = (n for n in self.model.state_dict() if n not in names)
        return names | {n for n in under if any(n[:i] in names for i, letter in enumerate(n) if letter == ".")}

    @property
    def frozen_tensors(self) -> dict[str, Tensor]:
        """What must stay as it came, by name: the parameters that no optimiser holds with what belongs to them, and `frozen_modules`."""
        rebuilt = self.not_saved
        own = {n: p for n, p in self.model.named_parameters() if n in rebuilt}
        under = rebuilt - {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        own |= {n: t for n, t in self.model.state_dict().items() if n in under}
        return own | {f"{k}.{n}": t for k, m in self.frozen_modules.items() for n, t in m.state_dict().items()}

    @property
    def gate_evaluator(self) -> "Stage | Probe":
        """Whose metric and evaluation count after a short training."""
        return self.probe or self

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name: those in some optimiser."""
        inside = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        return {n: p for n, p in self.model.named_parameters() if id(p) in inside}


PARTS = (*(f.name for f in fields(Stage)), "train")


"""Parts of a recipe: what it gives its stage, and its loop."""
