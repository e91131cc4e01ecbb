"""Is the planted cause the first that a gate names? Gates whose causes were a fixed list, whatever they had measured."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from trainworthy.core.base.verdict import Verdict, leading
from trainworthy.core.gates.causes import named
from trainworthy.core.gates.causes.dependence import Mixture, explain_mixed_samples
from trainworthy.core.gates.causes.resume import Watch, first_cause
from trainworthy.core.gates.checks import evaluation
from trainworthy.core.recipe.stage import Data, Field, View

from tests.core.planted_rates import MATH, rate
from tests.core.test_gates import PLANTS
from tests.vision.planted_classify import INIT, LOOP, ROWS, STAGES, UPDATE, staged

CASES = {
    "labels-from-one": "labels count from 1: id 10 occurs and id 0 does not",
    "background-class": "the list of classes has one that no split uses: background (its id is 0",
    "missing-class": "leaves 9 out",
    "sorted-split": "sorted by class before they were split",
    "bytes": "were not divided by 255",
    "divided-twice": "were divided by 255 twice",
    "inverted-validation": "are inverted (high for low)",
    "unsplit": "the training loader reads the unsplit data",
    "noisy-copies": "data were augmented or duplicated before they were split",
    "betas-exchanged": "the two betas are exchanged",
    "inverted-in-training": "the training path inverts its inputs",
    "turned-by-any-angle": "'6' turned by half is '9'",
    "keep-prob": "if 0.9 is the share to keep",
    "normalised-twice-in-training": "divides by 255 once more",
    "target-in-corner": "the target was written into the input: entry 0",
    "augmented-evaluation": "get() draws without a generator",
    "thousand-outputs": "the loss is ln 1000",
    "loud-head": "the last layer's initial weights are too large",
    "softmax-over-batch": "the softmax runs over the 256 samples of the batch",
    "softmax-twice": "softmax before cross-entropy",
    "input-lost": "the input does not reach the loss",
    "rate-too-low": "the rate is far too low",
    "evaluates-in-train-mode": "evaluation runs in train mode: head.0",
    "functional-dropout": "dropout without its training flag",
    "evaluation-moves-buffer": "evaluation writes to model.mean",
    "stays-in-eval": "model.eval() without model.train() after it",
    "evaluated-weights-not-put-back": "the raw weights not put back",
    "mean-of-means": "a mean over batch means",
    "centred-on-batch": "statistics over the batch axis, or attention across it (rows change with the other samples, not with their order): "
    "before stem (Conv2d)",
    "broadcast": "a broadcast of (B, 1) with (B,) in the loss: that of three samples is a mean over one axis of all pairs",
    "attention-over-batch": "statistics over the batch axis, or attention across it",
    "view-for-permute": "a reshape that mixes samples",
    "rolled-in-loss": "targets are shifted by one sample in the loss",
    "shard-number": "by another way, the entry 'side'",
    "label-as-input": "by another way, the entry 'side'",
    "local-counter": "no checkpoint holds the local variable `seen` of train(): 3 in the run that went on, 0 after the restart",
    "own-noise": "no checkpoint holds the local variable `noise` of train(): a generator",
    "normaliser-not-saved": "no checkpoint holds the local variable `shift` of train()",
    "own-optimizer": "no checkpoint holds the local variable `own` of train(): an AdamW",
    "average-not-resumed": "stage.state['ema'] is not restored",
    "last-batch-only": "the last batch alone counts",
    "mean-of-micro-batches": "the loss is a mean over its samples",
    "forgets-to-divide": "micro-batches are averaged although their sizes differ",
    "first-micro-batch-only": "the first of 2 micro-batches alone counts",
    "detached-head": "a detach(), no_grad() or argmax cuts the graph",
    "no-grad-body": "a detach(), no_grad() or argmax cuts the graph",
    "head-only": "built over a part of the model",
    "bf16-weights": "the rate is too small for the weights' precision",
    "generator-in-constructor": "made in __init__ or at import",
    "worker-seeds-itself": "get() seeds a generator itself",
    "seeded-by-index": "get() seeds a generator itself",
    "augmented-once": "stores augmented samples",
    "numpy-global": "numpy's",
    "order-without-epoch": "order() ignores the epoch (set_epoch)",
    "same-order-in-the-loop": "the loop reads data itself",
    "first-batch-again": "the same batch again and again",
    "split-twice": "the data set is split by process, and core splits it again",
    "average-ramp-never-advances": "the counter of updates is lost or reset",
    "average-forgets-too-soon": "stops below --ema",
    "raw-weights-exported": "evaluate() or export() uses the model instead of the average",
    "class-never-reaches-the-net": "the class never reaches the net",
    "null-is-a-class": "the null class is a real class",
    "dif-05-constant-timestep": "one timestep for the whole batch, or a constant",
    "flow-levels-of-another-mean": "drawn from another distribution than declared",
    "latent-cached-with-a-draw": "cached with a random draw instead of the mode",
    "latent-scaled-again-as-they-are-read": "multiplied where it should divide, or twice",
    "latent-exported-with-another-factor": "without its own factors in the config",
    "det-mirrored-apart": "pass both to one transform",
    "det-normalised-boxes": "boxes are divided by the picture's size",
    "seg-ids-interpolated": "use nearest neighbour",
    "labels-cross-documents": "mask labels where a document begins",
    "end-never-trained": "the end token is masked because it is also the pad",
    "perplexity-as-a-mean-of-means": "a mean of means",
    "reward-mean-over-tokens": "rewards are averaged over tokens",
    "reward-padded-with-another-token": "the reward is that of padding",
    "compress-labels-of-another": "labels belong to other recordings",
    "compress-teacher-wavers": "the teacher is in train mode, or dropout",
    "cosine-alone": "the loss is cosine alone",
    "error-alone": "the loss is squared error alone",
    "no-offset": "there is no offset for each position",
}
QUICK = ("labels-from-one", "bytes", "thousand-outputs")
"""A check of a second or two each; `make verify` has them all."""


@pytest.mark.parametrize("plant", [pytest.param(p, id=p.id, marks=[pytest.mark.verify] * (p.id not in QUICK))
                                   for p in PLANTS if p.id in CASES])  # fmt: skip
def test_the_planted_cause_is_the_first(plant, launch, fork):
    fork(plant.hunk, recipe=plant.recipe)
    done = launch("check", "mine.py", "--only", plant.gate, *plant.argv, code=3)
    verdict = next(v for v in done.verdicts() if v["id"] == plant.gate)
    assert CASES[plant.id] in verdict["remedy"].splitlines()[0], verdict["remedy"]


OBJECT = """    class Shift:
        value = 0.0

        def state_dict(self):
            return {"value": self.value}

    shift = Shift()
    for step in run.steps(stage):
        shift.value += 0.01
        for b in step.batches:
            b["image"] = b["image"] + shift.value
"""
OTHERS = {
    "metric-does-not-look": ("baseline", STAGES, staged("stage.evaluate = lambda model, data: {'accuracy': 1.0, 'loss': 0.0}"),
                             "the metric does not look at the answers: an untrained model has 1.00"),
    "target-read": ("baseline", STAGES, ROWS.replace('batch["side"]', 'batch["label"]').replace('b["side"]', 'b["label"]')
                    .replace("SIDE}", "data.labels[i]}"), "the target's own entry: given another sample's 'label' it answers that"),
    "own-generator": ("resume", INIT, INIT + "        self.own = torch.Generator().manual_seed(0)\n"
                      "        self.augment = lambda image: image + torch.rand((), generator=self.own)\n",
                      "it changes `own` of the training set, which no checkpoint holds"),
    "own-object": ("resume", LOOP, OBJECT + UPDATE, "no checkpoint holds the local variable `shift` of train(): a Shift in another state"),
    "expensive-and-slow": ("overfit", STAGES, staged("stage.expect.gate_batch_size = 8\nfor one in stage.optimizers['main'].param_groups:\n"
                           "    one['lr'] /= 300"), "the rate is far too low for"),
    "dead-mean": ("dependency", STAGES, staged('sums = stage.loss\nstage.loss = lambda m, b: {k: v / len(b["label"]) for k, v in '
                                               "sums(m, b).items()}"), "the loss is a MEAN over the batch: return the SUM"),
    "steps-taken-for-epochs": ("schedule", LOOP, rate("0.5 ** (step.index // 10)"),
                               "train() sets the rate by a count of steps of its own: 0.5 of the peak at step 20, also in a run of twice"),
    "cosine-of-four-processes": ("schedule", LOOP, rate("0.5 * (1 + math.cos(math.pi * min(4 * step.index, total) / total))", MATH),
                                 "a scheduler of your own steps more than once per step"),
}  # fmt: skip
"""Name -> (gate, old, new, first cause), of what other gates stop first."""


@pytest.mark.verify
@pytest.mark.parametrize("name", OTHERS)
def test_the_cause_is_the_first_where_the_gate_runs_alone(name: str, launch, fork):
    gate, old, new, words = OTHERS[name]
    fork((old, new))
    done = launch("check", "mine.py", "--only", gate, code=3)
    verdict = next(v for v in done.verdicts() if v["id"] == gate)
    assert words in verdict["remedy"].splitlines()[0], verdict["remedy"]


@pytest.mark.verify
def test_a_known_mistake_is_named_before_what_follows_from_it(launch, fork):
    """A Dice over rows also pulls at void pixels, which `scored` sees first. `formula` knows the mistake."""
    fork(("dice(logits.softmax(1), mask)", "dice(logits.softmax(2), mask)"), recipe="vision/segment")
    done = launch("check", "mine.py", "--only", "initial-loss,scored,formula", code=3)
    verdicts = {v["id"]: v for v in done.verdicts()}
    assert verdicts["scored"]["verdict"] == "fail", done.shown
    assert verdicts["initial-loss"]["verdict"] == "pass", "it leaves a loss of another form to `formula`"
    assert "see first: formula" in done.shown
    assert "the softmax runs over rows of the picture" in verdicts["formula"]["remedy"].splitlines()[0], done.shown


def test_a_resumed_run_of_which_nothing_differs_gets_no_cause():
    straight, resumed = Watch(3), Watch(3)
    straight.kept, resumed.kept = {"`a` of the training set": (1, "1")}, {"`a` of the training set": (1, "1")}
    resumed.begun = {"model.weight": 7}
    assert "no experiment explains it" in first_cause(straight, {"model.weight": 7}, resumed)
    resumed.kept = {"`a` of the training set": (2, "2")}
    assert "1 in the run that went on, 2 after the restart" in first_cause(straight, {}, resumed)
    assert "stage.state['ring'] is not restored" in first_cause(straight, {"model.a": 1, "state.ring.0": 2}, resumed)


@pytest.mark.parametrize("seed", range(40))
def test_a_mixture_that_no_experiment_fits_gets_no_cause(seed):
    """The largest logit of the batch is added to each sample's loss: neither pairs nor neighbours, and no module mixes. Five
    nets of a hundred fit pairs by accident where three samples alone are tried, one of a thousand where four threes are."""
    torch.manual_seed(seed)
    net, data = nn.Linear(3, 2), TensorPairs(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))

    def loss(model, batch):
        logits = model(batch["x"])
        return {
            "ce": nn.functional.cross_entropy(logits, batch["y"], reduction="sum") + len(logits) * logits.max().square()
        }

    stage = SimpleNamespace(model=net, loss=loss)
    run = SimpleNamespace(autocast=contextlib.nullcontext, device=torch.device("cpu"))
    mixture = Mixture(run, stage, data, lambda some: data.collate([data.get(i, None) for i in some]), 1e-3)
    assert explain_mixed_samples(mixture, [0, 1, 2, 3], mean=False).startswith("no experiment explains it")


@pytest.mark.parametrize(
    ("axis", "cause"), [(0, "log_softmax runs over axis 0, which holds samples (2 entries"), (1, "no experiment")]
)
def test_a_softmax_over_samples_is_named(axis: int, cause: str):
    """The divergence of two distributions over the entries of a batch (axis 0) or over the classes; the second stage has another fault."""
    torch.manual_seed(0)
    net, data = nn.Linear(4, 5), TensorPairs(torch.randn(12, 4), torch.rand(12, 5))

    def loss(model: nn.Module, batch: dict) -> dict:
        soft, hard = ((x * 3).log_softmax(axis) for x in (model(batch["x"]), batch["y"]))
        whole = (hard.exp() * (hard - soft)).sum()
        return {"kl": whole + (len(soft) * soft.exp().amax().square() if axis else 0)}

    stage = SimpleNamespace(model=net, loss=loss)
    run = SimpleNamespace(autocast=contextlib.nullcontext, device=torch.device("cpu"))
    mixture = Mixture(run, stage, data, lambda some: data.collate([data.get(i, None) for i in some]), 1e-3)
    assert explain_mixed_samples(mixture, [0, 1, 2, 3], mean=False).startswith(cause)


@pytest.mark.parametrize("both", [False, True])
def test_an_entry_that_leaves_its_sample_is_named(both: bool):
    """Pictures in the order of their brightness, with labels as they were: it was called statistics over the batch. Where both move, it is."""
    torch.manual_seed(0)
    net, data = nn.Bilinear(3, 5, 4), TensorPairs(torch.randn(8, 3), torch.randn(8, 5))

    def loss(model: nn.Module, batch: dict) -> dict:
        order = batch["x"].sum(1).argsort()
        out = model(batch["x"][order], batch["y"][order] if both else batch["y"])
        return {"mse": out.square().sum() + (out[0] * out[-1]).sum()}

    stage = SimpleNamespace(model=net, loss=loss)
    run = SimpleNamespace(autocast=contextlib.nullcontext, device=torch.device("cpu"))
    mixture = Mixture(run, stage, data, lambda some: data.collate([data.get(i, None) for i in some]), 1e-3)
    found = explain_mixed_samples(mixture, [0, 1, 2, 3], mean=False)
    assert found.startswith("the loss puts the samples of 'x' in another order than those of 'y'") != both, found


def test_a_deviation_over_samples_is_named():
    """One sample has none: what it gave was not a number, and no experiment compared it."""
    torch.manual_seed(0)
    net, data = nn.Linear(3, 4), TensorPairs(torch.randn(8, 3), torch.randint(4, (8,)))

    def loss(model: nn.Module, batch: dict) -> dict:
        z = model(batch["x"])
        return {"ce": nn.functional.cross_entropy((z - z.mean(0)) / z.std(0), batch["y"], reduction="sum")}

    stage = SimpleNamespace(model=net, loss=loss)
    run = SimpleNamespace(autocast=contextlib.nullcontext, device=torch.device("cpu"))
    mixture = Mixture(run, stage, data, lambda some: data.collate([data.get(i, None) for i in some]), 1e-3)
    found = explain_mixed_samples(mixture, [0, 1, 2, 3], mean=False)
    assert found.startswith("statistics over the batch axis: a sample alone has the loss nan")


def test_a_symptom_is_not_what_is_looked_at_first():
    """`overfit` without a measured cause has a list that fits everything; the next gate names what it saw."""

    def failed(id: str, cause: str = "") -> Verdict:
        return Verdict(id, "", id, "fail", "measured", "needed", cause or "a list", 0.0, cause=cause)

    assert leading([failed("overfit"), failed("answers")]).id == "answers"
    assert leading([failed("overfit", "softmax twice"), failed("answers")]).id == "overfit"
    assert leading([failed("overfit"), failed("tiny-data")]).id == "overfit"


class TensorPairs(Data):
    """Rows of two tensors."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor):
        self.x, self.y = x, y
        self.fields = {"x": Field("input"), "y": Field("target", classes=["no", "yes"])}

    def __len__(self) -> int:
        return len(self.x)

    def get(self, index: int, generator: torch.Generator | None) -> dict:
        return {"x": self.x[index], "y": self.y[index]}


def test_every_case_is_a_plant():
    assert {p.id for p in PLANTS} >= set(CASES)


def test_a_number_that_fits_no_known_fault_names_none():
    """The fixed list stands: a cause that is not supported would be worse."""
    wide = Field("input", low=0.0, high=1.0)
    assert named.explain_range(wide, {"min": 0.0, "max": 3.0}) == ""
    assert named.explain_range(wide, {"min": 0.0, "max": 255.0})
    assert named.explain_path_scales(0.13, 0.31, 0.3, 0.9, wide) == ""
    levels = Field("input", low=0, high=999)
    assert "another setting" in named.explain_range(levels, {"min": 0.0, "max": 24.0, "shape": {"max": []}})
    assert "the sample's own" in named.explain_range(levels, {"min": 7.0, "max": 7.0, "shape": {"max": []}})
    assert named.explain_range(levels, {"min": 0.0, "max": 24.0, "shape": {"max": [3, 16, 16]}}) == ""
    accident = math.log(16973)  # of a head that starts too large: the other half of the samples has another loss
    assert named.explain_uniform_outputs(accident, accident + 0.1, math.log(10), 256) == ""
    assert "ln 16973" in named.explain_uniform_outputs(accident, accident, math.log(10), 256)
    assert named.explain_uniform_outputs(math.log(10) * 1.2, math.log(10) * 1.2, math.log(10), 256) == ""
    assert named.explain_double_softmax(1.8, 10, 0.1) == ""
    assert named.explain_batched_metric(0.5, [0.4, 0.7, 0.1], [4, 4, 4]) == ""
    assert (
        named.explain_batched_metric(0.5, [0.4, 0.6], [4, 4]) == ""
    )  # the mean over batches is the mean over samples here
    assert named.explain_micro_batches(0.5, None, 2, mean=False, equal_agree=False) == ""


@pytest.mark.parametrize(
    ("training", "cause"), [([], "the others in its batch"), (["net.1"], "evaluation runs in train mode: net.1")]
)
def test_a_metric_that_depends_on_the_batch_names_what_is_left_after_random_draws_are_excluded(training, cause):
    """The better half of each batch counts."""
    scores = torch.arange(12.0).roll(5)

    def measure(_: object, view: View) -> dict[str, float]:
        rows = scores[list(view.indices)].split(4)
        return {"return": torch.cat([row.sort().values[len(row) // 2 :] for row in rows]).mean().item()}

    run = SimpleNamespace(precision="fp32", measure=measure)
    view = View(SimpleNamespace(fields={}), range(12))
    wrong, found = evaluation._unequal(
        run, None, view, training, ({"return": 5.0}, {"return": 5.0}, {"return": 7.0}), (12, 4), dict
    )
    assert "depends on the evaluation batch size: 5.00000 at 12, 7.00000 at 4" in wrong
    assert cause in found


def test_a_net_that_reads_its_input_is_not_said_to_be_deaf():
    """Also where its head is still zero, so that no output depends on any input; also while it has batch norm."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    nn.init.zeros_(net[2].weight)
    batch = {"x": torch.randn(8, 4), "y": torch.arange(8) % 3}

    def said(net: nn.Module) -> str:
        return named.explain_ignored_input(
            net, lambda b: nn.functional.cross_entropy(net(b["x"]), b["y"]), batch, ["x"]
        )

    assert said(net) == ""
    assert net.training

    class Deaf(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.ones_like(x))

    assert "does not reach the loss" in said(Deaf(*net))
