"""Tiny-data gate: the model learns a few hundred samples, and scores above chance on unseen ones (null_model.py)."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from trainworthy.core.base import seeds
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data import neighbours
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes import not_learnt
from trainworthy.core.gates.checks import paths
from trainworthy.core.gates.checks.learning import not_memorised
from trainworthy.core.gates.checks.null_model import CLEAR, FASTER, MANY, Retrained, distinct, late_gain, reaches
from trainworthy.core.gates.gate import GateContext, categorical, fetch, pick, total_loss, train_set
from trainworthy.core.loop.optim import scale_peaks
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Data, Metric, Stage, View

TINY, HELD_OUT, FEWEST = 256, 250, 32  # training samples, held-out samples, and the minimum of either
MORE = 2048  # training samples where nothing carries over from TINY
PERMUTATIONS, ENOUGH = 10, 4  # and the fewer that suffice if the result is twice what is needed
TESTED = 128  # samples of the test split
LEARNT = 0.1  # fraction of the range from chance to the ceiling that counts as learnt
CLOSE = 1.5  # below this factor over what is needed, other samples are tried too
TINY_STEPS = 120
LOSS_SAMPLES = 64  # training samples whose loss is tracked
SECONDS = 60.0  # time limit of a tiny-data run on this process


@dataclass
class Skill:
    """The metric on samples with their own inputs, against the same samples with other samples' inputs or classes."""

    own: float
    others: float
    """Mean over the permutations."""
    spread: float
    """Standard deviation over the permutations."""
    gap: float
    """How much better `own` is than `others`."""
    needed: float
    permuted: str = "each other's inputs"

    @property
    def clear(self) -> bool:
        return self.gap > self.needed

    def __str__(self) -> str:
        return f"{self.own:.3f} ({self.others:.3f} +- {self.spread:.3f} with {self.permuted})"


def skill(
    run: Run, stage: Stage, data: Data, indices: list[int], seed: int, classes: tuple[str, list[int]] | None = None
) -> Skill:
    """Measure whether the model answers from the input. Inputs are permuted over the samples, so knowledge of the
    target distribution alone scores the same on both sides, with any metric. With `classes` (target, values), whole
    classes are permuted instead (see null_model.py)."""
    metric = stage.gate_evaluator.metric
    sign = 1 if metric.higher_is_better else -1

    def scored(**permuted: Any) -> float:
        return run.measure(stage, View(data, indices, **permuted), probe=True)[metric.name]

    def permutation(i: int) -> dict[str, Any]:
        if classes is None:
            return {"swap": seeds.permutation(len(indices), seed, "others", i).tolist()}
        key, values = classes
        order = seeds.permutation(len(values), seed, "classes", i).tolist()
        return {"relabel": {key: {v: values[j] for v, j in zip(values, order, strict=True)}}}

    own, others = scored(), []
    for i in range(PERMUTATIONS):
        others.append(scored(**permutation(i)))
        if len(others) < ENOUGH:
            continue
        mean, spread = statistics.mean(others), statistics.stdev(others)
        found = Skill(own, mean, spread, gap=sign * (own - mean), needed=max(3 * spread, LEARNT * _range(metric, mean)),
                      permuted="classes permuted" if classes else "each other's inputs")  # fmt: skip
        if agreed(run.accelerator, found.gap > 2 * found.needed):
            break
    return found


def is_sure(found: Skill) -> bool:
    """Return whether a result is twice what is needed: at least six standard deviations."""
    return found.gap > 2 * found.needed


def _range(metric: Metric, chance: float) -> float:
    """Range from chance to the ceiling. The measured chance level counts if it is better than the declared one."""
    return abs(metric.ceiling - (chance if metric.better(chance, metric.floor) else metric.floor))


class Subset:
    """A few samples of both splits, and what a model scores on them."""

    def __init__(self, context: GateContext, n: int, every: int, seed: int):
        self.context, self.every, self.seed = context, every, seed
        data = context.peek().data
        self.train, self.val = data["train"], data["val"]
        key, self.only = categorical(self.train), None
        if key:  # with a thousand classes, use sixteen, so that each has several samples
            seen = [int(self.train.get(i, None)[key]) for i in pick(self.train, n, seed)]
            self.only = sorted(set(seen), key=lambda c: (-seen.count(c), c))[:16]
        self.learn = pick(self.train, n, seed, only=self.only)
        self.held_out = pick(self.val, HELD_OUT, seed, only=self.only)
        if min(len(self.learn), len(self.held_out)) < FEWEST:
            raise Skip(
                f"{len(self.learn)} training and {len(self.held_out)} held-out samples are too few to distinguish skill from chance"
            )
        self.others = seeds.permutation(len(self.held_out), seed, "chance").tolist()
        self.tested = pick(data["test"], TESTED, seed, only=self.only) if "test" in data else []

    def is_read_at(self, step: int) -> bool:
        return step in (5, 10) or step % self.every == 0

    def loss(self, run: Run, stage: Stage, swap: list[int] | None = None) -> float:
        """Return the loss on some training samples, with the same draws each time."""
        some = View(self.train, self.learn, swap=swap)
        batch = fetch(some, list(range(min(len(self.learn), LOSS_SAMPLES))), self.seed, run.device)
        with evaluating(stage.model):
            return total_loss(run, stage, batch).item()

    def metric(self, run: Run, stage: Stage, swap: list[int] | None = None) -> float:
        """Return the metric on the held-out samples."""
        found = run.measure(stage, View(self.val, self.held_out, swap=swap), probe=True)
        return found[stage.gate_evaluator.metric.name]

    def carries(self, run: Run, stage: Stage, value: float) -> bool:
        """Return whether the metric has covered a third of the range from chance to the ceiling. Chance is measured with
        other samples' inputs, never assumed."""
        m = stage.gate_evaluator.metric
        if not reaches(m, value, m.floor + (m.ceiling - m.floor) / 3):
            return False
        chance = self.metric(run, stage, self.others)
        return reaches(m, value, chance + (m.ceiling - chance) / 3)

    def reads(self, run: Run, stage: Stage, target: str, values: list[int]) -> bool:
        """Return whether the metric depends on this target. That of a generator does not depend on the class."""
        others = {target: dict(zip(values, values[1:] + values[:1], strict=True))}
        views = (View(self.val, self.held_out, relabel=one) for one in ({}, others))
        own, relabelled = (run.measure(stage, view, probe=True)[stage.gate_evaluator.metric.name] for view in views)
        return agreed(self.context.accelerator, own != relabelled)

    def scores(self, run: Run, stage: Stage) -> dict[str, Any]:
        """Return what the trained model knows of both splits."""
        classes = distinct(self.val, self.held_out)
        if classes and not self.reads(run, stage, *classes):
            classes = None
        whole = classes if classes and len(classes[1]) >= MANY else None
        carried = skill(run, stage, stage.data["val"], self.held_out, self.seed, whole)
        learnt = skill(run, stage, stage.data["train"], self.learn, self.seed)
        more = self.held_out
        if not stage.expect.gate_batch_size:
            more = pick(self.val, min(len(self.val), paths.MOST), self.seed, only=self.only)
        tested, span = None, _range(stage.gate_evaluator.metric, carried.others)
        if len(self.tested) >= FEWEST and carried.clear and carried.gap > 2 * LEARNT * span:
            tested = skill(run, stage, stage.data["test"], self.tested, self.seed)
        return {"train": learnt, "held_out": carried, "test": tested, "classes": len(classes[1]) if classes else 0,
                "behind": paths.compare_scores(run, stage, self.learn, learnt.own),
                "exchanged": paths.find_exchanges(run, stage, self.learn, more)}  # fmt: skip

    def retrain(self, steps: int, batch: int, before: list[float]) -> Retrained:
        """Train once more for as many steps, on permuted inputs. `before`: the losses on the samples' own inputs."""
        mixed = seeds.permutation(len(self.learn), self.seed, "mixed").tolist()
        losses: list[float] = []
        began = time.process_time()

        def late(stage: Stage, step: int) -> bool:
            if self.is_read_at(step):
                losses.append(self.loss(run, stage, mixed))
            return agreed(self.context.accelerator, bool(losses) and time.process_time() - began > SECONDS)

        run, stage = self.context.build(
            Rehearsal(steps=steps, samples=self.learn, batch_size=batch, swap=mixed, watch=late)
        )
        self.context.train(self.context.cfg, run, stage)
        own, others = (self.metric(run, stage, swap) for swap in (None, self.others))
        sign = 1 if stage.gate_evaluator.metric.higher_is_better else -1
        return Retrained.of(before, losses, (own - others) * sign)


def _train_on_few(context: GateContext, *, n: int, steps: int, batch: int, every: int, patient: bool = False,
                  seed: int | None = None, rate: float = 1.0) -> dict:  # fmt: skip
    """Run the recipe's own `train()`, with its draws, rates and schedule, on `n` samples, and compute the held-out
    metric every `every` steps. Stop early once that metric has covered a third of the range from measured chance to the ceiling,
    unless `patient`. `seed` selects the samples; `rate` is a factor of the learning rate."""
    started = time.process_time()
    subset = Subset(context, n, every, context.cfg.run.seed if seed is None else seed)
    if not context.deep:
        _afford(context, (PERMUTATIONS + 1) * (len(subset.learn) + len(subset.held_out)))
    found: dict = {"samples": len(subset.learn), "held_out_curve": [], "steps": 0, "at_most": steps, "in_time": True, "losses": []}  # fmt: skip

    def watch(stage: Stage, step: int) -> bool:
        found["steps"], ended = step, False
        if subset.is_read_at(step):
            found["losses"].append(subset.loss(run, stage))
        if step % every == 0:
            found["held_out_curve"].append(value := subset.metric(run, stage))
            ended = not context.deep and not patient and subset.carries(run, stage, value)
        found["in_time"] = time.process_time() - started <= SECONDS
        return agreed(context.accelerator, not context.deep and (ended or not found["in_time"]))

    run, stage = context.build(Rehearsal(steps=steps, samples=subset.learn, batch_size=batch, watch=watch))
    scale_peaks(stage.optimizers.values(), rate)
    found["losses"].append(subset.loss(run, stage))
    context.train(context.cfg, run, stage)
    found |= subset.scores(run, stage)
    found["retrain"] = lambda: subset.retrain(found["steps"], batch, found["losses"])
    return found


def _afford(context: GateContext, samples: int) -> None:
    """Skip if evaluating so many samples takes longer than the whole gate may (a metric on generated sequences)."""
    run, stage = context.build(Rehearsal(steps=1))
    subset = View(stage.data["val"], range(min(16, len(stage.data["val"]))))
    started = time.process_time()
    run.measure(stage, subset, probe=True)
    needed = agreed(context.accelerator, (time.process_time() - started) / len(subset) * samples)
    if needed > SECONDS:
        raise Skip(
            f"evaluating {samples:,} samples takes {needed:.0f} s: run `trainworthy check --deep --only tiny-data`"
        )


TEST_LOST = "test is read differently: another order of classes, other labels, scale or transform"
BEHIND = "the evaluation path reads samples differently from the training path: channels, scale, crop, size, ids"


@gate(
    "tiny-data",
    rows="C19",
    title="the model learns a few hundred samples, and generalises to unseen ones",
    reads="data model loss counts evaluate metric probe confusion optimizers state train",
    symptom=True,
)
def tiny_data(context: GateContext) -> Finding:
    """Run `train()` briefly on 256 samples, then score those and 250 held-out ones. On both, the metric must be clearly
    better than that of a model trained on shuffled labels. A pretrained model overfits here, so the gap between the two
    is not limited. An unclear result gets four times as many steps; a narrow pass is repeated on other samples. Deep:
    250 samples, 30 epochs (120 if needed), and a plateau."""
    probe = context.peek()
    metric, cfg, span = probe.gate_evaluator.metric, context.cfg, _span(context)
    world = context.accelerator.num_processes
    batch = max(min(max(cfg.train.batch_size, 32), TINY), 4 * world)

    def go(times: int, n: int = TINY, **how: Any) -> dict:
        if context.deep:
            steps = 30 * times * math.ceil(250 / 32)
            return _train_on_few(context, n=250, steps=steps, batch=max(32, 4 * world), every=steps // 30, **how)
        return _train_on_few(context, n=n, steps=times * TINY_STEPS, batch=batch, every=20, **how)

    found, gain, allowed, doubt, wrong = {}, 0.0, math.inf, False, []
    for times in (1, 4):
        whole, found = found, go(times, patient=doubt)
        if context.deep:
            gain, allowed = late_gain(found["held_out_curve"], metric)
        wrong = [e for e in found["exchanged"] if e.sure]
        doubt = not wrong and any(e.held_out > paths.DOUBT for e in found["exchanged"])
        done = found["train"].clear and found["held_out"].clear and gain <= allowed and not doubt
        settled = wrong or found["behind"]
        if not done and not settled:
            _leave_to_others(context, found["steps"])
        memorised = not context.deep and found["train"].gap > span / 2 and not doubt
        if done or settled or memorised or not found["in_time"]:
            break
    found = found if settled else _on_more(context, _in_time(found, whole), partial(go, 4, n=MORE))
    learnt, carried, again, retrained = found["train"], found["held_out"], None, None
    narrow = learnt.clear and carried.clear and carried.gap < CLOSE * carried.needed
    n = MORE if found["samples"] > TINY else TINY
    if narrow and not settled and found["in_time"] and not context.deep:
        again = go(times, n=n, seed=cfg.run.seed + 1)["held_out"]
    close = found["classes"] < MANY and (found["classes"] or carried.gap < CLEAR * span)
    ok = learnt.clear and carried.clear and gain <= allowed and (again is None or again.clear)
    if not settled and (not ok or close):
        retrained = found["retrain"]()
        close = close and not retrained.belongs and not is_sure(carried)
        if ok and found["classes"] and close and again is None and found["in_time"] and not context.deep:
            again = go(times, n=n, seed=cfg.run.seed + 1)["held_out"]
        ok = ok and not _by_chance(found, close and not (again is not None and is_sure(again)), retrained)
    measured, needed = _describe(found, metric.name, again, retrained)
    if context.deep:
        late = f"last third of {30 * times} epochs: {'a plateau' if gain <= allowed else 'still better'} ({gain:+.3f})"
        measured += f"; {late} at {carried.own:.3f}"
        needed += f"; a plateau: no gain above {allowed:.3f} within the last third"
    causes = [] if ok or settled else [not_learnt.why(learnt, carried, retrained, partial(not_memorised, context))]
    lost = _lost_in_test(found)
    causes = [*[paths.REMEDY] * bool(wrong), *[BEHIND] * bool(found["behind"]), *[TEST_LOST] * lost, *causes]
    names = paths.names_of(probe, 1 + max(c for e in wrong for c in e.classes)) if wrong else []
    measured = "; ".join([*(e.words(names) for e in wrong), *[found["behind"]] * bool(found["behind"]), measured])
    return Finding(
        ok and not found["behind"] and not wrong and not lost, measured, needed, "\n".join(causes),
        evidence=_plain(found, again=again, retrained=retrained),
        cause="" if ok or settled else _measured_cause(context, found, partial(go, 1, n=n, patient=True)),
        batch=fetch(probe.data["val"], pick(probe.data["val"], 16, cfg.run.seed), None, context.accelerator.device),
    )  # fmt: skip


def _span(context: GateContext) -> float:
    """Return the metric's range from floor to ceiling. Skips where there is none, or where a sample takes too long."""
    probe = context.peek()
    train_set(probe)
    if probe.expect.gate_batch_size and not context.deep:
        raise Skip("one sample takes too long for this check: run `trainworthy check --deep --only tiny-data`")
    metric = probe.gate_evaluator.metric
    span = abs(metric.ceiling - metric.floor)
    if not 0 < span < math.inf:
        raise Skip(f"the metric has no range: floor {metric.floor:g}, ceiling {metric.ceiling:g}")
    return span


def _leave_to_others(context: GateContext, steps: int) -> None:
    """Skip where a gate before this one has failed: longer trainings take minutes, and the run is blocked anyway."""
    if context.failed and not context.deep:
        raise Skip(f"not learnt in {steps} steps, and `{context.failed[0]}` has failed: fix that first, then run this gate again, which "
                   "then takes more steps")  # fmt: skip


def _measured_cause(context: GateContext, found: dict, again: Callable[..., dict]) -> str:
    """Return the cause that the data report shows, or a training at another rate; "" if neither does."""
    if context.deep or context.accelerator.num_processes > 1:
        return ""
    return neighbours.weaker(context.data_report) or not_learnt.by_rate(found, again)


def _on_more(context: GateContext, found: dict, go: Callable[[], dict]) -> dict:
    """Return what a training on more samples finds, if only that carries over: each user or product needs samples of its own."""
    few = found["in_time"] and not context.deep and len(context.peek().data["train"]) > TINY
    if not few or not found["train"].clear or found["held_out"].clear:
        return found
    more = go()
    return more if more["train"].clear and more["held_out"].clear else found


def _by_chance(found: dict, unsure: bool, retrained: Retrained) -> bool:
    """Return whether a result may be luck: as good as that of permuted labels. `unsure`: of classes. A net that memorises fits permuted labels
    as fast, so retraining decides only where no held-out result is sure."""
    if found["classes"]:
        return unsure
    carried = found["held_out"]
    return carried.gap <= max(carried.needed, 2 * abs(retrained.gap))


def _plain(found: dict, **more: Any) -> dict[str, Any]:
    """Return what was found as plain values."""
    kept = {k: v for k, v in found.items() if k not in ("retrain", "losses")}
    more["test"] = found["test"]
    kept |= {k: asdict(found[k]) for k in ("train", "held_out")} | {k: v and asdict(v) for k, v in more.items()}
    return kept | {"exchanged": [asdict(e) for e in found["exchanged"]]}


def _describe(found: dict, metric: str, again: Any, retrained: Any) -> tuple[str, str]:
    """Return what was measured and what is needed, in words."""
    learnt, carried = found["train"], found["held_out"]
    measured = (
        f"{metric} after {found['steps']} steps on {found['samples']} samples: {learnt}; on held-out ones: {carried}"
    )
    measured += f"; on other samples: {again}" if again else ""
    measured += f"; {retrained}" if retrained else ""
    measured += f"; on the test split: {found['test']}" if found["test"] else ""
    needed = f"both better by more than {learnt.needed:.3f} and {carried.needed:.3f} (3 sd, {LEARNT:.0%} of chance to ceiling)"
    needed += f"; a mean loss lower by {FASTER * abs(retrained.first):.2g} than on permuted inputs" if retrained else ""
    needed += f"; on the test split by more than {carried.gap / 4:.3f}" if _lost_in_test(found) else ""
    return measured, needed


def _lost_in_test(found: dict) -> bool:
    """Return whether samples of the test split score like chance although validation is clearly above it."""
    test = found["test"]
    return test is not None and not test.clear and test.gap < found["held_out"].gap / 4


def _in_time(found: dict, whole: dict) -> dict:
    """Return the result to use: that of the run that ended, if time ran out before a clear one. A run that was cut short,
    or whose loss was still falling, counts as no evidence."""
    if found["in_time"] or (found["train"].clear and found["held_out"].clear):
        return found
    ended = found if found["steps"] >= found["at_most"] else whole
    losses = ended.get("losses", [])
    quarter = max(1, len(losses) // 4)
    falls = bool(losses) and statistics.mean(losses[-quarter:]) < 0.95 * statistics.mean(losses[:quarter])
    if not ended or (falls and not ended["train"].clear):
        raise Skip(
            f"no result after {found['steps']} steps in {SECONDS:.0f} s: run `trainworthy check --deep --only tiny-data`, which has no time limit"
        )
    return ended
