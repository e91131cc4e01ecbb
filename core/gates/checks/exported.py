"""Checks the export as users will load it. A fresh process without this project's modules loads what `Stage.export`
wrote. It answers samples that were not read through the recipe's data path. The answers must equal those of the
evaluated model.

A recipe declares `Stage.exported`. The gate exports the overfit model; the end of a run checks the reported model.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.errors import Stop
from trainworthy.core.base.processes import agreed
from trainworthy.core.base.verdict import Finding, Skip, Verdict
from trainworthy.core.gates import gate
from trainworthy.core.gates.checks.export_weights import export_to
from trainworthy.core.gates.checks.learning import overfitted
from trainworthy.core.gates.gate import GateContext, pick
from trainworthy.core.loop.run import Rehearsal, Run, evaluating
from trainworthy.core.recipe.stage import Data, Metric, Stage, View

SAMPLES, AT_END = 8, 16  # per split in the gate; held-out samples at the end of the run
MANY = 120  # held-out samples of a fork with its own preprocessing, whose answers can only be compared by their score
LIMIT = 1e-2  # of the largest answer: TF32 against a CPU differs by up to 3e-3, two different models by 0.1 or more
FLIPPED = 0.1  # fraction of the range from chance level to the ceiling
SECONDS = 600  # time limit of the reading process
ASK = Path(__file__).with_name("query_export.py")
TITLE = "the export gives users the answers that the evaluation scored"


@dataclass
class Exported:
    """How users load what `export` writes."""

    reader: Path
    """A file that imports nothing of this project, with `load(folder)` and `answer(loaded, sample) -> {way: tensor}`.
    Each entry is one way to load the export (a program, a library's constructor)."""
    sample: Callable[[Data, int], dict[str, Any]]
    """(data, index) -> the sample as a user has it, read from the stored file and not through `data.get`: tensors,
    numbers, texts."""
    answers: Callable[[nn.Module, Data, Sequence[int]], list[Tensor]]
    """(model, data, indices) -> answers of the recipe's own evaluation path, in the shape of the reader's answers."""
    score: Callable[[Data, Sequence[int], list[Tensor]], float]
    """(data, indices, answers) -> the stage's metric of these answers, on one process and without `evaluate`."""
    ready: Callable[[Data, int], dict[str, Any]] | None = None
    """The same sample as `data.get(index, None)` returns it; the reader uses it unchanged. If answers differ, it
    separates wrong weights from a wrong preprocessing."""
    metric: str = ""
    """The metric that `score` computes, if a fork may have chosen another one for the stage: then answers are compared, not scored."""


def query(reader: Path, folder: Path, samples: list[dict[str, Any]]) -> dict[str, list[Tensor]]:
    """Return {way: answer to each sample} of the export in `folder`, from a fresh process. Raises RuntimeError if it
    cannot be loaded."""
    with tempfile.TemporaryDirectory() as name:
        questions, answers = Path(name) / "samples.pt", Path(name) / "answers.pt"
        torch.save(samples, questions)
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        command = [sys.executable, str(ASK), str(reader), str(folder.absolute()), str(questions), str(answers)]
        try:
            done = subprocess.run(command, cwd=name, env=env, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no answer to {len(samples)} samples in {SECONDS} s") from None
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:300])
        found = torch.load(answers, weights_only=True)
    return {way: [one[way] for one in found] for way in found[0]}


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference between two lists of answers, relative to the largest answer; 1 if their shapes
    differ."""
    if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return 1.0
    size = max((to_double(a).abs().max().item() for a in ours if a.numel()), default=0.0)
    pairs = ((to_double(a), to_double(b)) for a, b in zip(ours, theirs, strict=True) if a.numel())
    largest = max(((a - b).abs().max().item() for a, b in pairs), default=0)
    return largest / size if size else float(largest > 0)


def compared(
    stage: Stage, folder: Path, some: dict[str, list[int]], suspects: Callable[[], dict[str, nn.Module]] = dict
) -> Finding:
    """Compare the export in `folder` with the evaluated model on samples `some` ({split: indices}). `suspects` are
    other modules that may have been exported instead, with their descriptions as keys."""
    seen = _compare_answers(stage, folder, some, suspects)
    if names := renumbered(stage, folder):
        seen.ok, seen.measured = False, f"{names}; {seen.measured}"
        why = (
            "the exported class names are in another order than the outputs: write the list that the data set declares"
        )
        seen.remedy = f"{why}\n{seen.remedy}"
    return seen


def _compare_answers(
    stage: Stage, folder: Path, some: dict[str, list[int]], suspects: Callable[[], dict[str, nn.Module]]
) -> Finding:
    exported, metric = stage.exported, stage.metric

    def answered(model: nn.Module, some: dict[str, list[int]] = some) -> list[Tensor]:
        with evaluating(model):
            return [a.float().cpu() for k, i in some.items() for a in exported.answers(model, stage.data[k], i)]

    def stored(some: dict[str, list[int]]) -> list:
        return [exported.sample(stage.data[k], i) for k, j in some.items() for i in j]

    ours = answered(stage.eval_model)
    needed = f"the same answers within {LIMIT:g} of the largest, and so the same {metric.name}"
    own_way, problem, theirs, because = False, "", {}, ""
    try:
        questions = stored(some)
    except Exception as error:  # a fork's own data set may raise anything
        raise Skip(f"this check cannot read stored samples of these data: {type(error).__name__}: {error}") from None
    try:
        theirs = query(exported.reader, folder, questions)
    except RuntimeError as error:
        problem = str(error)
    differences = {way: difference(ours, answers) for way, answers in theirs.items()}
    worst = max(differences, key=differences.get, default="")
    if exported.ready and (problem or differences[worst] > LIMIT):
        with contextlib.suppress(RuntimeError):
            made = [exported.ready(stage.data[k], i) for k, j in some.items() for i in j]
            as_made = query(exported.reader, folder, made)
            own_way = max(difference(ours, answers) for answers in as_made.values()) <= LIMIT
    if problem and not own_way:
        return Finding(False, f"the export cannot be read in a fresh process: {problem}", needed,
                       "files that the reader needs are missing, or have the format of another library")  # fmt: skip
    scores = _scored(stage, some, ours, theirs.get(worst))
    if own_way:  # one more of eight right is no evidence that a fork's own preprocessing is wrong
        scores, val = {}, stage.data["val"]
        many = {"val": pick(val, min(stage.expect.at_most(MANY, times=4), len(val)), 0)}
        with contextlib.suppress(RuntimeError):
            by_export = query(exported.reader, folder, stored(many)).get(worst)
            found = _scored(stage, many, answered(stage.eval_model, many), by_export)
            scores = {k: s._replace(differs=_better(metric, s, len(many[k]))) for k, s in found.items()}
    count, gaps = sum(map(len, some.values())), [f"{k} differs by {v:.1e}" for k, v in differences.items()]
    gaps += [f"{metric.name} {found.theirs:.3f} on {k}" for k, found in scores.items()]
    measured = f"{count} samples in a fresh process: {', '.join(gaps)}"
    wrong = [f"{metric.name} {found.theirs:.3f} of {k} samples by the export, {found.ours:.3f} by this run"
             for k, found in scores.items() if found.differs]  # fmt: skip
    if own_way:
        extra = f"get() does to a stored sample what config.json and {exported.reader.name} do not"
        measured = f"{count} inputs as get() makes them get the same answers in a fresh process; {extra}"
        because = f"the weights are right, and stored samples score better without it: {extra}\n" if wrong else ""
    elif differences[worst] > LIMIT:
        wrong.insert(0, f"{worst} differs by {differences[worst]:.2g}")
        because = _another_net({k: difference(answered(net), theirs[worst]) for k, net in suspects().items()})
    return Finding(
        not wrong, "; ".join([*wrong, measured] if wrong else [measured]), needed,
        because + "export() writes another net than the evaluated one: a newly built one, or the raw weights instead of the EMA\n"
        "config.json names another preprocessing than that of get(), or get(index, None) changes stored samples in another way\n"
        "the exported program is in train mode (dropout, statistics of a batch)",
        evidence={"differences": differences, "scores": {k: [v.ours, v.theirs] for k, v in scores.items()}},
    )  # fmt: skip


def renumbered(stage: Stage, folder: Path) -> str:
    """Return how a `config.json` of the export numbers the classes that a target declares, if it numbers the same names otherwise; else "".
    Other names (a translation, or more of them) say nothing."""
    declared = [[*map(str, f.classes)] for data in stage.data.values() for f in data.fields.values() if f.role == "target" and f.classes]  # fmt: skip
    for file in sorted(folder.rglob("config.json")):
        for key, listed in _numbered(json.loads(file.read_text())).items():
            same = [names for names in declared if sorted(names) == sorted(listed)]
            if same and listed not in same:
                moved = [i for i, (a, b) in enumerate(zip(listed, same[0], strict=True)) if a != b]
                return (f"{file.name} names output {moved[0]} '{listed[moved[0]]}' ({key}), in the data class {moved[0]} is "
                        f"'{same[0][moved[0]]}'; {len(moved)} of {len(listed)} differ")  # fmt: skip
    return ""


def _numbered(config: Any) -> dict[str, list[str]]:
    """Return the lists of distinct names in a configuration, also as {"0": name} and {name: 0}, by key."""
    found: dict[str, list[str]] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        names: list = []
        if isinstance(value, list):
            names = value
        elif isinstance(value, dict) and all(str(k).isdecimal() for k in value):
            names = [name for _, name in sorted(value.items(), key=lambda one: int(one[0]))]
        elif isinstance(value, dict) and all(type(i) is int for i in value.values()):
            names = sorted(value, key=value.get)
        if len(names) > 1 and all(isinstance(name, str) for name in names) and len({*names}) == len(names):
            found[key] = names
    return found


def _another_net(differences: dict[str, float]) -> str:
    """Return which other net gives the export's answers, if one does. `differences`: {net: difference of its answers}."""
    likely = min(differences, key=differences.get, default="")
    if not likely or differences[likely] > LIMIT:
        return ""
    return f"the export holds {likely}: its answers differ from those by {differences[likely]:.1e} only\n"


class Scores(NamedTuple):
    """The metric of this run's answers and of the export's, and whether they differ."""

    ours: float
    theirs: float
    differs: bool


def _scored(
    stage: Stage, some: dict[str, list[int]], ours: list[Tensor], theirs: list[Tensor] | None
) -> dict[str, Scores]:
    """Compute the metric by split; nothing if `Exported.score` does not compute the stage's."""
    if stage.exported.metric not in ("", stage.metric.name):
        return {}
    found: dict[str, Scores] = {}
    start = 0
    for split, indices in some.items() if theirs else ():
        part = slice(start, start + len(indices))
        start += len(indices)
        try:
            own, other = (stage.exported.score(stage.data[split], indices, one[part]) for one in (ours, theirs))
        except (RuntimeError, ValueError, IndexError):  # the shapes of the answers differ
            continue
        found[split] = Scores(own, other, abs(other - own) > allowed(stage.metric, len(indices)))
    return found


def _better(metric: Metric, scores: Scores, n: int) -> bool:
    """Return whether the export's score is better beyond chance: by three standard errors of a share over `n` samples."""
    gap = (scores.theirs - scores.ours) * (1 if metric.higher_is_better else -1)
    return gap > 3 * span(metric) * math.sqrt(0.25 / n)


def allowed(metric: Metric, n: int) -> float:
    """Return the allowed difference of a metric over `n` samples: two samples may be close to a decision boundary."""
    return max(FLIPPED, 2 / n) * span(metric)


def span(metric: Metric) -> float:
    """Return the range from chance level to the ceiling; 1 if the metric is unbounded."""
    way = abs(metric.ceiling - metric.floor)
    return way if 0 < way < float("inf") else 1.0


@gate(
    "export",
    rows="C18",
    title=TITLE,
    reads="data model evaluate metric export exported optimizers state loss counts train",
)
def export_gate(context: GateContext) -> Finding:
    """Export the overfit model and load it in a fresh process. Samples of both splits must get the evaluation path's
    answers. On the training samples, `evaluate` must return the metric of these answers."""
    run, stage, found = overfitted(context)
    if "loss" not in found:
        raise Skip("the training loop made no step (see overfit)")
    train, val = stage.data["train"], stage.data["val"]
    count = stage.expect.at_most(SAMPLES)
    some = {"train": found["indices"][:count], "val": pick(val, min(count, len(val)), context.cfg.run.seed)}
    measured = run.measure(stage, View(train, some["train"]))[stage.metric.name]

    def compare_files() -> Finding:
        with tempfile.TemporaryDirectory() as name:
            changed = export_to(stage, Path(name))
            seen = compared(stage, Path(name), some, lambda: suspects(context, stage))
            seen.cause = seen.cause or changed * (not seen.ok)
            return seen

    seen = agreed(run.accelerator, compare_files() if run.rank == 0 else None)
    own = seen.evidence.get("scores", {}).get("train", [measured])[0]
    if abs(own - measured) > allowed(stage.metric, len(some["train"])):
        seen.ok = False
        seen.measured = (
            f"evaluate returns {stage.metric.name} {measured:.3f}, the same answers score {own:.3f}; {seen.measured}"
        )
        seen.remedy = f"evaluate() scores other answers, other labels or another order than the model's\n{seen.remedy}"
    return seen


def suspects(context: GateContext, stage: Stage) -> dict[str, nn.Module]:
    """Return what may have been exported instead of the evaluated model."""
    fresh = context.build(Rehearsal(steps=1))[1]
    found = {"a net that was never trained": fresh.eval_model}
    return found | ({} if stage.ema_model is None else {"the raw weights instead of their average": stage.model})


class WrongExport(Stop):
    """The export differs from the evaluated model."""


def at_end(run: Run, stage: Stage, folder: Path) -> Verdict:
    """Check the export of a finished run."""
    val = stage.data["val"]
    some = {"val": pick(val, min(stage.expect.at_most(AT_END), len(val)), run.cfg.run.seed)}
    try:
        seen = compared(stage, folder, some)
    except Skip as skip:
        return Verdict("export", "C18", TITLE, "skip", "", "", "", 0.0, reason=str(skip))
    except Exception as error:  # an error here must not lose the trained weights
        measured = f"raised {type(error).__name__}: {error}"
        return Verdict(
            "export", "C18", TITLE, "advice", measured, "a comparison", "correct what Stage.exported declares", 0.0
        )
    return Verdict("export", "C18", TITLE, "pass" if seen.ok else "fail", seen.measured, seen.needed,
                   "" if seen.ok else seen.remedy, 0.0, evidence=json.loads(json.dumps(seen.evidence)))  # fmt: skip
