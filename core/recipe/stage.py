"""What a recipe gives to core: a `Stage`, the `Data` that it reads, and an `Expect`. Gates and monitors use nothing
else of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate
from trainworthy.core.base import seeds
from trainworthy.core.recipe.figures import Tile


@dataclass
class Field:
    """Describes one entry of a sample, so that core can count it, check it for leaks and blank it without knowing the
    domain."""

    role: str
    """One of five:
    - `input`: the model reads it.
    - `target`: the model must predict it.
    - `group`: an id (patient, document, video) that must not occur in two splits.
    - `source`: what the input is made from (the clean image under the noise, the whole text of a crop). Where a sample
      has one, the leakage gate compares sources instead of inputs.
    - `extent`: it only says what is scored (a mask of the targets, a length). Gates do not blank or exchange it."""
    classes: Sequence[str] | None = None
    """Names of a categorical target's values, by index."""
    low: float | None = None
    high: float | None = None
    """Highest valid value, included; `low` is the lowest."""
    fabricated: Callable[[dict[str, Any]], float] | None = None
    """sample -> fraction (0 to 1) of this entry that was not measured: interpolated, padded, resampled or synthetic.
    The sample is what `get` returns, so a data set can add an entry that holds the fraction: `lambda s: s["padded"]`.
    The fraction is reported. A gate checks that it does not predict the target."""
    grouped_by: str = ""
    """What the samples of a `group` share if the data have no such column (`question`). Reports name this instead of the field."""
    computed: bool = False
    """A net of the stage made this entry (latents, a teacher's features), so another process or device gives values that
    differ by rounding. A resumed run does not compare them with those of its start."""


class Data:
    """A map-style data set. Every random draw comes from the generator that the caller passes.

    `fields` describes the entries of a sample. Subclasses implement `__len__` and `get`.
    """

    fields: dict[str, Field]
    notes: Mapping[str, str] = MappingProxyType({})
    """Lines for the data report and the card that the numbers do not show: samples left out, formats converted."""

    def __len__(self) -> int:
        raise NotImplementedError

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Any]:
        """Return sample `index`. With a generator: the training path; augmentation draws from it, or from torch's
        global generator, which has the same seed. With None: the evaluation path, without any randomness."""
        raise NotImplementedError

    def read(self, index: int) -> Any:
        """Fetch what sample `index` has to wait for (its file); `make` receives the result. With `--loader.threads`,
        several threads call this ahead of time, so it must not draw random numbers or change anything. Default: nothing
        to fetch."""
        return None

    def make(self, index: int, got: Any, generator: torch.Generator | None) -> dict[str, Any]:
        """Build sample `index` from what `read` returned. A data set with `read` and `make` implements `get` as
        `make(index, read(index), generator)`."""
        return self.get(index, generator)

    def peek(self, index: int, key: str) -> Any:
        """Return one entry of a sample on the evaluation path. Override it if a target can be had without decoding its
        input."""
        return self.get(index, None)[key]

    def identity(self, index: int) -> bytes | str | None:
        """Return bytes or a hash that identify sample `index` without decoding it, for example its file's content. With
        it, the leakage gate compares all samples exactly, however many there are. Threads call it. None: the gate
        hashes the fields that `get` returns, over all samples if that takes seconds only."""
        return None

    def source_class(self, index: int) -> str | None:
        """Return the class that the source gives the sample (its folder's name), without reading the label. None:
        unknown."""
        return None

    def source_name(self, index: int) -> str | None:
        """Return what the source calls the sample (its file's path). None: it has no name."""
        return None

    def order(self, *parts: int | str) -> Tensor:
        """Return a permutation (n,) of the samples that depends on `parts` alone. Override it if random access is
        slow."""
        return seeds.permutation(len(self), *parts)

    def representative(self, count: int) -> Sequence[int]:
        """Return `count` evenly spaced indices, used where not all samples are read. Override it if random access is
        slow."""
        return [i * len(self) // count for i in range(count)]

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Combine samples into a batch. Tensors are stacked along a new first axis."""
        return default_collate(samples)


@dataclass
class View(Data):
    """A subset of another data set, optionally with some entries replaced. Gates use it."""

    data: Data
    indices: Sequence[int]
    blank: tuple[str, ...] = ()
    """Fields to replace by zeros (texts by the empty string)."""
    swap: Sequence[int] | None = None
    """For each sample, the position (in `indices`) of the sample whose input fields it gets."""
    relabel: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """{categorical target: {class: class that replaces it}}."""
    draws: int | None = None
    """If set, the evaluation path returns augmented training samples, with the draws of epoch 0 under this seed."""

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
    """Return the name of the first target that has classes, one for a sample (not one for each of its positions), or None."""
    named = (k for k, f in data.fields.items() if f.role == "target" and f.classes)
    return next((k for k in named if len(data) and _single(data.peek(0, k))), None)


def _single(value: Any) -> bool:
    return not isinstance(value, str) and torch.as_tensor(value).numel() == 1


def _blank(value: Any) -> Any:
    return "" if isinstance(value, str) else torch.zeros_like(torch.as_tensor(value))


@dataclass
class Metric:
    """The metric that selects the best checkpoint, and the question that it answers."""

    name: str
    """Its key in the result of `evaluate`."""
    question: str
    floor: float
    """Chance level: the score of a model that ignores its input."""
    ceiling: float
    """Score of a perfect model."""
    higher_is_better: bool = True
    best_known: str = ""
    """Best published result for this task and data, with its source."""

    def better(self, a: float, b: float) -> bool:
        """Return whether `a` is strictly better than `b`."""
        return a > b if self.higher_is_better else a < b


@dataclass
class Probe:
    """Another metric, with its evaluation, for gates that train for seconds. Set it if the stage's own metric needs a
    whole run to show progress (sample quality of a generator, for example)."""

    metric: Metric
    evaluate: Callable[[nn.Module, Data], dict[str, float]]


@dataclass
class Expect:
    """What a healthy recipe does, from theory or measurement. A gate that misses its expectation skips and reports that
    it skipped."""

    initial_loss: float | Callable[[dict], float] | None = None
    """Loss per sample of the untrained model (softmax over N balanced classes: ln N). A function of the batch if it draws."""
    loss_floor: float | Callable[[dict], float] = 0.0
    """Lowest loss on the overfit batch (label smoothing: the smoothed targets' entropy). A function of it if it draws (mixup)."""
    floor_known: bool = True
    """False: a loss above its floor passes where the metric is at its goal (a VAE's)."""
    overfit_steps: int = 120
    """Optimiser steps within which the model must memorise eight fixed samples."""
    overfit_longer: bool | None = None
    """Whether four times as many steps may be used while the loss still falls (default: only if `overfit_steps` and
    `gate_batch_size` have their defaults; a recipe that sets them has measured its own rate and cost)."""
    gate_batch_size: int = 0
    """Largest batch that a gate may use; set it if a sample takes a large part of a second. 0: no limit.
    - The overfit, micro-batch and evaluation gates use up to twice, the data gates up to four times this many samples.
    - Below 8, only `check --deep` runs the range test and tiny-data."""
    overfit_metric: float | Callable[[dict], float] | None = None
    """Value of the metric that the overfit batch must reach through the real evaluation (default: the metric's
    ceiling)."""
    frozen: tuple[str, ...] = ()
    """Name prefixes of parameters of `model` that are frozen on purpose."""
    no_gradient: tuple[str, ...] = ()
    """Name prefixes of trainable parameters that may get no gradient for a few steps (an unused head, an idle expert)."""
    new_parameters: tuple[str, ...] = ()
    """Name prefixes of parameters that the pretrained weights lack on purpose (the head of another task)."""
    batch_dependence: str = ""
    """Reason why samples of a batch influence each other (contrastive loss). Leave empty if they must not."""
    random_loss: str = ""
    """Reason why two forwards of one batch under one seed may differ. Leave empty if they must not."""
    nondeterministic: str = ""
    """Reason why two runs with one seed may differ (an environment with its own generator). Leave empty if they must
    not."""
    schedule: str = ""
    """Reason why learning rates do not follow `--optim.schedule`, or why an optimiser does not step exactly once per
    iteration (for example, PPO's update epochs). Leave empty if they do."""
    solvable_without_input: str = ""
    """Reason why the model can answer a few samples without their inputs (a choice between two given answers). Leave
    empty if it must not."""
    range_test: str = ""
    """Reason why a range test on one batch finds no usable learning rates (DPO, reinforcement learning). Leave empty if
    it does."""
    sampling: str = ""
    """Reason why a sample may occur twice in an epoch or the order may repeat (sampling with replacement, a curriculum,
    rollouts). Leave empty if an epoch holds every sample once, in a new order."""
    unused_fields: tuple[str, ...] = ()
    """Entries of the batch that make no difference in this stage: a later stage reads them, or a setting switches off what does."""
    small_terms: tuple[str, ...] = ()
    """Loss terms that may contribute almost nothing to the gradient (a regulariser near its optimum)."""
    loss_may_rise: str = ""
    """Reason why the loss does not measure progress (targets that move with the policy). Leave empty if lower is
    better."""

    def at_most(self, n: int, *, times: int = 1) -> int:
        """Return `n`, reduced to `times * gate_batch_size` if that is set and smaller."""
        return min(n, times * self.gate_batch_size) if self.gate_batch_size else n


def batch_size(batch: dict[str, Any]) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    return next(v.shape[0] for v in batch.values() if isinstance(v, Tensor))


def rows(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with layers of their own that are in a row of modules: the blocks of most models."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        blocks = [child for child in model.children() if any(child.children())]  # diffusers puts None into some lists
        if blocks:
            return blocks
    return [block for child in model.children() for block in rows(child)]


@dataclass
class Stage:
    """One phase of training. The recipe defines model, data, loss and evaluation; core adds precision, processes,
    clipping, checkpoints, logging and gates."""

    name: str
    model: nn.Module
    """The bare module; core wraps it. Parameters that are in no optimiser are frozen."""
    optimizers: Mapping[str, Optimizer]
    data: Mapping[str, Data]
    """`train`, `val`, and optionally `test`: a split on which no setting was chosen. Core evaluates the reported
    weights on `test` once, at the end of the run; model selection uses `val` alone.

    Without `train` the loop makes its own samples (for example, a rollout in every iteration of `run.steps`). One
    iteration then counts as an epoch, and `--train.batch-size` is the number of samples of one update."""
    loss: Callable[[nn.Module, dict], dict[str, Tensor]]
    """(model, batch) -> {term: SUM over the batch}. It must depend on the batch alone, which already holds every random
    draw."""
    evaluate: Callable[[nn.Module, Data], dict[str, float]]
    """(model, data) -> metrics over all processes, computed the way users will use the model."""
    metric: Metric
    evaluate_while_training: Callable[[nn.Module, Data], dict[str, float]] | None = None
    """A cheaper evaluation for the run's own loop, if `evaluate` is expensive (it generates text). It must return `metric`. Core
    runs `evaluate` once more at the end. Default: `evaluate`."""
    intervals: Callable[[], dict[str, tuple[float, float]]] | None = None
    """-> {metric: 95% interval over the samples} of the last call of `evaluate`; the report shows them next to the result."""
    probe: Probe | None = None
    """Replaces `metric` and `evaluate` in gates that train on a few samples. Default: `metric` and `evaluate`."""
    counts: Callable[[dict], Mapping[str, float | Tensor]] = lambda batch: {"*": batch_size(batch)}
    """batch -> {term: denominator}. Core calls it BEFORE the forward and sums the counts over the global batch. The key
    `"*"` holds for every term without a key of its own. Default: the number of samples."""
    confusion: Callable[[nn.Module, Data], Tensor] | None = None
    """(model, data) -> (n, n) counts over all processes, true classes in rows. Core uses it to find held-out classes
    whose names are swapped."""
    ema_model: nn.Module | None = None
    """The weights to evaluate, keep as best and export instead of `model` (its EMA). None: `model`."""
    state: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint must also hold: objects with state_dict() and load_state_dict() (EMA, normaliser, replay
    buffer). A large one may have release(): gates call it on stages that they keep and no longer train."""
    on_start: Callable[[], None] | None = None
    """Called once, after `--init-from` has loaded the weights and before the first step, for example to copy a
    reference model."""
    frozen_modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules that the stage uses and never trains (teacher, reference model, reward model, scoring model). Core moves
    them to the device, freezes them and sets them to eval mode. A gate checks that training does not change them, and a
    resumed run that they are the same. They are not saved."""
    expect: Expect = field(default_factory=Expect)
    baselines: Callable[[], dict[str, dict[str, float]]] = dict
    """-> {baseline: metrics}, shown in the report next to the result."""
    upper_bounds: tuple[str, ...] = ()
    """Names of baselines that the model need not beat (a teacher, real data)."""
    preview: Callable[[dict], list[Tile]] | None = None
    """batch -> images or texts decoded from its tensors: what the model reads."""
    predict: Callable[[nn.Module, dict], list[Tile]] | None = None
    """(model, batch) -> one prediction for each sample."""
    figures: Callable[[nn.Module, Data], dict[str, Any]] | None = None
    """(model, data) -> {title: list of Tiles, a Matrix or Points} for the report."""
    pretrained: dict[str, Tensor] | None = None
    """The state dict from which `model` started, with the names in the file. `--init-from` fills it; a recipe that
    loads weights itself sets it. A gate compares it with the model. Core drops it before the full run trains."""
    export: Callable[[Path], None] | None = None
    """Writes the export in a format that other libraries load. Default: model.safetensors."""
    model_card: Mapping[str, Any] = field(default_factory=dict)
    """Header of the export's README.md, with the hub's keys (base_model, license, datasets, library_name, tags), and the keys
    `usage`, a Python example (card.md has it, too), `script`, a file that the example imports, copied to export/use.py, and `called`,
    a base that is not on the hub. Core adds results, gates and settings. Empty: the export gets no README.md."""
    exported: Any = None
    """How users load the export (an `exported.Exported`). A gate, and the end of each run, load it in a fresh process
    and compare its answers with the model's."""
    shard_units: Callable[[nn.Module], Sequence[nn.Module]] | None = rows
    """model, its EMA or a module of `shard_frozen` -> submodules whose parameters `--shard` gathers together, one unit after
    the other. Each must be called as a module. What is in none of them is one more unit, for which the module itself must
    be called. Default: `rows`. None: not to be sharded, because processes call the model unequally often."""
    shard_frozen: tuple[str, ...] = ()
    """Names of `frozen_modules` that `--shard` shards, too. All processes must call them equally often."""
    gates: list = field(default_factory=list)
    """The domain's own gates, in addition to core's."""
    monitors: list = field(default_factory=list)
    """The domain's own monitors, in addition to core's, for faults that only the evaluations of a whole run can
    show."""

    copies = cast("Sequence[nn.Module]", ())
    """Copies of models that gates keep with the stage; no field."""
    wrapped = cast("tuple[nn.Module, nn.Module] | None", None)
    """(model, the module whose forward is its loss), once it is trained; no field: a copy of the stage wraps its own model."""

    @property
    def eval_model(self) -> nn.Module:
        """The module that is evaluated: the EMA if there is one, else the model."""
        return self.model if self.ema_model is None else self.ema_model

    @property
    def not_saved(self) -> set[str]:
        """Names of parameters that are in no optimiser, and of state dict entries below them (for example, scales of
        quantised weights). Checkpoints leave them out, because the recipe loads them from their own source again."""
        trained = {id(p) for p in self.parameters().values()}
        names = {n for n, p in self.model.named_parameters(remove_duplicate=False) if id(p) not in trained}
        under = (n for n in self.model.state_dict() if n not in names)
        return names | {n for n in under if any(n[:i] in names for i, letter in enumerate(n) if letter == ".")}

    @property
    def frozen_tensors(self) -> dict[str, Tensor]:
        """Tensors that training must not change, by name: parameters in no optimiser with their buffers, and
        `frozen_modules`."""
        rebuilt = self.not_saved
        own = {n: p for n, p in self.model.named_parameters() if n in rebuilt}
        under = rebuilt - {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        own |= {n: t for n, t in self.model.state_dict().items() if n in under}
        return own | {f"{k}.{n}": t for k, m in self.frozen_modules.items() for n, t in m.state_dict().items()}

    def follows(self, name: str) -> bool:
        """Return whether a tensor that no optimiser has may change in training, as an average of weights does."""
        return False

    @property
    def gate_evaluator(self) -> "Stage | Probe":
        """The probe if there is one, else the stage: its metric and evaluation are used after a short training."""
        return self.probe or self

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name: those in some optimiser."""
        inside = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        return {n: p for n, p in self.model.named_parameters() if id(p) in inside}


PARTS = (*(f.name for f in fields(Stage)), "train")  # what a recipe gives its stage, and its loop
