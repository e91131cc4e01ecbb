"""The report is one self-contained page that tells the truth about a run folder in any state."""

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from trainworthy.core import report
from trainworthy.core.base.errors import UserError
from trainworthy.core.commands import reference as command
from trainworthy.core.report import bands, charts
from trainworthy.core.report.advice import Advice, advise, planned_epochs
from trainworthy.core.report.card import against as against_lines
from trainworthy.core.report.card import measured
from trainworthy.core.report.folder import read

from tests.helpers.commands import holds

SETTINGS = {
    "train": {"epochs": 10, "batch_size": 8},
    "optim": {"schedule": "cosine", "clip": 1.0},
    "hub": {"token": "abc-secret"},
}
SUMMARY = {
    "metric": "accuracy",
    "higher_is_better": True,
    "floor": 0.1,
    "ceiling": 1.0,
    "baselines": {"logistic": {"accuracy": 0.6}},
}
GATE = {"stage": "classify", "rows": "C4", "title": "eight samples are learnt", "verdict": "pass", "measured": "loss 2.30 -> 0.01",
        "needed": "loss <= 0.1", "remedy": "", "seconds": 1.25, "reason": "", "remembered": ""}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- advice
def epochs(values: list[float], train: list[float] | None = None, lr: list[float] | None = None) -> list[dict]:
    """Rows of epoch_metrics.jsonl, one evaluation per epoch."""
    n = len(values)
    train, lr = train or [1 / (i + 1) for i in range(n)], lr or [1e-3 * (1 - i / n) for i in range(n)]
    return [
        {"epoch": i + 1, "step": 8 * (i + 1), "val/accuracy": v, "train/loss": t, "lr": r}
        for i, (v, t, r) in enumerate(zip(values, train, lr, strict=True))
    ]


def titles(found: list[Advice]) -> str:
    return " | ".join(a.title for a in found)


def test_flat_after_the_schedule_says_stop_and_that_only_a_longer_schedule_helps():
    found = advise(epochs([0.5, 0.8, 0.85, 0.88, 0.89, 0.9, 0.9, 0.901, 0.9, 0.901]), SUMMARY, SETTINGS, 1000)
    assert found[0].title == "Stop: the curve is flat"
    holds(found[0].evidence, "schedule has ended", "not a longer run")
    assert "0.0095" in found[0].evidence, "sqrt(0.9 * 0.1 / 1000), what the gain is compared with"
    assert found[1].title == "It beats every baseline"
    assert "0.6000" in found[1].evidence


def test_the_same_curve_is_flat_or_rising_as_the_number_of_samples_says():
    rows = epochs([0.80, 0.81, 0.82, 0.83, 0.84])
    assert "flat" in advise(rows, SUMMARY, {**SETTINGS, "train": {"epochs": 5}}, 50)[0].title
    assert "improving" in advise(rows, SUMMARY, {**SETTINGS, "train": {"epochs": 5}}, 50_000)[0].title


def test_a_metric_at_its_ceiling_needs_nothing_more():
    found = advise(epochs([0.7, 0.9, 0.99, 1.0, 1.0]), SUMMARY, {**SETTINGS, "train": {"epochs": 5}}, 50_000)
    assert found[0].title == "Stop: the metric is at its ceiling"


def test_rising_before_the_end_continues_to_a_landing_point_on_the_line():
    """At most as far ahead as the line looks back (here 4 epochs): further ahead it was wrong by half a run's range."""
    found = advise(epochs([0.5, 0.55, 0.6, 0.65, 0.7]), SUMMARY, SETTINGS, 1000)[0]
    assert found.title == "Continue: it is still improving"
    assert "would reach 0.9000 after 4 more epochs" in found.evidence
    beyond = advise(epochs([0.5, 0.6, 0.7, 0.8, 0.9]), SUMMARY, SETTINGS, 1000)[0]
    assert "would reach 1.0000" in beyond.evidence, "never above the ceiling"


def test_a_strict_metric_near_chance_is_not_called_no_learning_while_the_loss_on_held_out_data_falls():
    """Exact match of a language model on 20 rows, for example."""
    rows = epochs([0.1, 0.1, 0.12])
    assert advise(rows, SUMMARY, {**SETTINGS, "train": {"epochs": 3}}, 20)[0].title == "Validation shows no learning"
    rows = [row | {"val/perplexity": p} for row, p in zip(rows, (15.0, 9.0, 8.0), strict=True)]
    found = advise(rows, SUMMARY, {**SETTINGS, "train": {"epochs": 3}}, 20)
    assert "Stop" not in titles(found)
    longer = next(one for one in found if one.title.startswith("Train longer"))
    holds(longer.evidence, "perplexity on held-out data fell from 15 to 8.0000", "--train.epochs 6")


def test_a_loss_without_a_known_worst_value_has_advice():
    """Another tool's evaluation loss, best at its lowest: nothing is divided by a gain of zero."""
    found = advise(
        epochs([0.7, 0.5, 0.9, 0.45, 0.95, 0.5, 0.9]), {"metric": "accuracy", "higher_is_better": False}, SETTINGS, 0
    )
    assert found[0].title == "Unclear: the evaluations are too noisy for a trend"
    assert "all that was gained" in found[0].evidence


def test_rising_at_the_end_asks_for_a_longer_schedule_unless_the_rate_is_constant():
    rows = epochs([0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75])
    assert advise(rows, SUMMARY, SETTINGS, 1000)[0].title.startswith("Change the schedule")
    constant = {**SETTINGS, "optim": {"schedule": "constant"}}
    assert advise(rows, SUMMARY, constant, 1000)[0].title == "Continue: it is still improving"


def test_a_run_that_max_steps_cut_has_ended_with_its_schedule():
    """30 epochs were set and 8 were made: the schedule was laid over these steps."""
    rows = epochs([0.5 + 0.05 * i for i in range(8)])
    cut = {"epochs": 30.0, "max_steps": rows[-1]["step"]}
    assert planned_epochs(rows[-1], cut) == rows[-1]["epoch"]
    found = advise(rows, SUMMARY, {"train": cut, "optim": {"schedule": "cosine"}}, 10_000)[0]
    assert (found.title, "schedule has ended" in found.evidence) == ("Change the schedule: it is still improving", True)


def test_falling_training_loss_with_a_worsening_metric_is_overfitting():
    values = [0.6, 0.7, 0.8, 0.85, 0.84, 0.83, 0.82, 0.8, 0.79, 0.78]
    found = advise(epochs(values), SUMMARY, SETTINGS, 1000)
    assert found[0].title == "Stop: it is overfitting"
    assert "0.8500" in found[0].evidence
    assert "Fine-tune from the best, not from the last" in titles(found)
    rising_loss = advise(epochs(values, train=[0.1 * (i + 1) for i in range(10)]), SUMMARY, SETTINGS, 1000)
    assert rising_loss[0].title == "Change the schedule: lower the rate"


def test_flat_at_a_high_rate_waits_for_the_schedule():
    found = advise(epochs([0.7, 0.8, 0.8, 0.8, 0.8, 0.8], lr=[1e-3] * 6), SUMMARY, SETTINGS, 1000)
    assert found[0].title == "Continue: flat, but the rate is still high"


def test_no_clear_lead_on_a_baseline_comes_first_and_no_baseline_is_said():
    found = advise(epochs([0.6, 0.6, 0.605, 0.6, 0.61]), SUMMARY, SETTINGS, 1000)
    assert found[0].title.startswith("Do not use it yet")
    taught = {**SUMMARY, "baselines": {**SUMMARY["baselines"], "its teacher": {"accuracy": 0.99}}}
    assert advise(epochs([0.1, 0.5, 0.9, 0.95, 0.96]), taught, SETTINGS, 1000)[0].title.startswith("Do not use it yet")
    taught["bounds"] = ("its teacher",)
    assert "It beats every baseline" in titles(advise(epochs([0.1, 0.5, 0.9, 0.95, 0.96]), taught, SETTINGS, 1000))
    none = advise(epochs([0.6, 0.6, 0.605, 0.6, 0.61]), {**SUMMARY, "baselines": {}}, SETTINGS, 1000)
    assert "No baseline to compare with" in titles(none)


def test_lower_is_better_and_unbounded_metrics_use_their_own_scatter():
    rows = [{**r, "val/nll": 3.0 - r["val/accuracy"]} for r in epochs([0.1, 0.5, 0.9, 1.3, 1.7])]
    summary = {"metric": "nll", "higher_is_better": False, "baselines": {"unigram": {"nll": 2.5}}}
    found = advise(rows, summary, SETTINGS, 1000)
    assert found[0].title == "Continue: it is still improving"
    assert "scatter" in found[0].evidence
    assert "It beats every baseline" in titles(found)


def test_what_no_more_epochs_mend_comes_first_and_names_the_rate():
    """Collapsed after having learnt, diverged from the start, nothing learnt though the loss falls, no number any more."""
    fell = advise(epochs([0.5, 0.8, 0.9, 0.11, 0.1, 0.1], train=[2, 1, 0.5, 2.3, 2.3, 2.3]), SUMMARY, SETTINGS, 1000)
    assert fell[0].title == "It collapsed: go back to the best weights"
    assert "100% of it is lost" in fell[0].evidence
    wild = advise(epochs([0.1, 0.11, 0.1, 0.09, 0.1], train=[2.4, 30, 80, 70, 90]), SUMMARY, SETTINGS, 1000)
    assert wild[0].title == "It diverged: lower the rate"
    deaf = advise(epochs([0.1, 0.11, 0.1, 0.09, 0.1], train=[2.3, 1, 0.5, 0.2, 0.1]), SUMMARY, SETTINGS, 1000)
    assert deaf[0].title == "Validation shows no learning"
    assert (
        "too low, or so high that the model collapsed" in deaf[0].evidence
    )  # a reward model at a rate of 5e-3: the loss stays ln 2
    assert "trainworthy check" in deaf[0].evidence
    gone = advise(epochs([0.5, 0.6, 0.7, math.nan]), SUMMARY, SETTINGS, 1000)
    assert gone[0].title == "Stop: the metric is no longer a number"
    dip = advise(epochs([0.5, 0.8, 0.9, 0.7, 0.91, 0.92], train=[2, 1, 0.5, 0.6, 0.4, 0.3]), SUMMARY, SETTINGS, 1000)
    assert "collapsed" not in titles(dip), "a single dip that came back"


def test_too_few_or_broken_evaluations_give_no_trend():
    assert advise([], SUMMARY, SETTINGS, 100)[0].title == "Too early to say"
    first, then = advise(epochs([0.1, 0.2, math.nan]), SUMMARY, SETTINGS, 100)
    assert first.title == "Stop: the metric is no longer a number"
    assert "2 finite" in then.evidence


@pytest.mark.parametrize(("own_samples", "step"), [(True, "rewards that are too rare"), (False, "--train.epochs")])
def test_a_run_no_better_than_chance_says_what_to_try_after_any_number_of_evaluations(own_samples: bool, step: str):
    """The console sends the reader to this section ("what to try: report.html"). After two evaluations it said "Too early to say"."""
    ended = {**SUMMARY, "warning": "NO BETTER THAN CHANCE: accuracy 0, chance 0"}
    found = advise(epochs([0.0, 0.0]), ended, SETTINGS, 100, own_samples=own_samples)[0]
    assert found.title == "It has learnt nothing that validation shows"
    assert found.urgent
    for words in ("NO BETTER THAN CHANCE", step, "trainworthy lr", "2 finite evaluations"):
        assert words in found.evidence


# ---------------------------------------------------------------------------------------------------------------- page
class Outline(HTMLParser):
    """Checks that tags nest, and collects what a browser would fetch."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.images_without_alt = 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.add(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "xlink:href")]
        self.images_without_alt += tag == "img" and not found.get("alt")
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> closes another element, line {self.getpos()}"


def page(folder: Path) -> str:
    """The report of `folder`: well-formed, self-contained, accessible; its text."""
    text = report.write(folder).read_text()
    outline = Outline()
    outline.feed(text)
    assert not outline.stack
    assert len(outline.ids) == len(set(outline.ids)), "ids are unique"
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in outline.links)
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)
    assert not outline.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert not re.search(r"@import|https?://|//fonts", text)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert not outline.images_without_alt
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of a few steps, with a class whose name is markup."""
    run = tmp_path / "runs" / "toy" / "20260101-000000-ab12"
    for split in ("train", "val"):
        (run / "previews" / split).mkdir(parents=True)
        (run / "previews" / split / "captions.json").write_text('["<b>", "cat"]')
        for i in range(2):
            save_png(run / "previews" / split / f"{i:02d}.png")
    lines(
        run / "previews" / "predictions.jsonl",
        [{"step": s, "captions": ["cat", "cat"], "good": [0.25, None]} for s in range(8, 88, 8)],
    )
    lines(run / "step_metrics.jsonl", [
        {"step": i + 1, "step/loss": 2 / (i + 1) if i != 5 else "nan", "step/grad_norm": 0.5 + (i % 2), "step/lr": 1e-3,
         "step/samples_per_sec": 9.0}
        for i in range(80)
    ])  # fmt: skip
    lines(run / "epoch_metrics.jsonl", epochs([0.5, 0.7, 0.8, 0.85, 0.88, 0.9, 0.9, 0.901, 0.9, 0.9]))
    put(run / "gates.json", {"enabled": True, "seconds": 2.5, "gates": [
        {**GATE, "id": "schema", "verdict": "pass", "evidence": {}},
        {**GATE, "id": "overfit", "verdict": "pass", "evidence": {"curve": [[10, 1.0, None], [20, 0.1, 1.0]], "note": "<i>"}},
    ]})  # fmt: skip
    field = {"role": "target", "dtype": "int64", "non_finite_samples": 0, "shape": {"min": [], "median": [], "max": []},
             "min": 0, "max": 1, "mean": [0.5], "std": [0.5], "classes": {"<b>": 37, "cat": 3},
             "per_class": {"min": 3, "median": 37, "max": 37}, "invalid": {}}  # fmt: skip
    split = {"samples": 1000, "read": 1000, "unique_contents": 998, "fields": {"label": field}}
    put(
        run / "data.json",
        {"splits": {"train": split, "val": split}, "overlap": {"exact": 7, "near": None, "groups": {"id": []}}},
    )
    put(
        run / "args.json",
        {"recipe": "toy", "preset": "tiny", "argv": ["toy", "--train.epochs", "10"], "settings": SETTINGS},
    )
    put(
        run / "environment.json",
        {"versions": {"torch": "2.14"}, "commit": "c0ffee", "diff": "+ key = hf_abcdefghijklmnopqrst"},
    )
    put(run / "summary.json", {**SUMMARY, "recipe": "toy", "question": "is it a <b>?",
        "best_known": "0.97, seen at hf_abcdefghijklmnopqrst", "reported": {"weights": "final", "step": 80, "accuracy": 0.9},
        "metrics": {"accuracy": 0.9, "recall/<b>": 0.95, "recall/cat": 0.4321},
        "final": {"step": 80, "val/accuracy": 0.9}, "n_best": [{"step": 64, "accuracy": 0.901}, {"step": 48, "accuracy": 0.9}],
        "seeds": [0], "steps": 80, "epochs": 10, "train_seconds": 3.2, "skipped_steps": [6], "figures": {
            "Confusion": {"values": [[36, 1], [0, 3]], "rows": ["<b>", "cat"], "columns": ["<b>", "cat"],
                          "axes": ["truth", "prediction"]},
            "Samples": [{"caption": "a cat", "image": [[0, 255], [255, 0]], "good": None}]}})  # fmt: skip
    (run / "card.md").write_text(
        "# toy: is it a <b>?\n\n**accuracy 0.9000**\n\n| | a |\n|---|---|\n| x | 1 |\n\n- pass: schema\n"
    )
    return run


def put(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def save_png(path: Path) -> None:
    from matplotlib import image

    image.imsave(path, np.eye(4), cmap="gray")


def test_a_finished_run_shows_its_numbers_and_is_self_contained(folder: Path):
    text = page(folder)
    holds(text, "2 of 2 gates passed", "0.9000", "0.6000", "0.1000", "final weights, step 80", "one seed", "the curve is flat",
                  "1 skipped steps", "50% of steps were clipped at 1", "0.4321", "7 exact", "998", "c0ffee", "truth")  # fmt: skip
    assert {p.name for p in (folder / "plots").iterdir()} >= {"loss.png", "metric.png", "rate.png", "norm.png"}
    assert "prefers-color-scheme: dark" in text
    assert "var(--line)" in text[text.index("<svg") :], "curves follow the page's colours"
    assert "#f1e2d" not in text


def test_what_baselines_have_beside_the_metric_stands_in_one_table_everywhere(folder: Path):
    """Perplexity and the like: on the console, the card and the page, with a gap where a baseline was not asked."""
    summary = json.loads((folder / "summary.json").read_text())
    own = {"accuracy": 0.9, "perplexity": 9.93, "unasked": 1.0}
    against = {
        "4-shot": {"accuracy": 0.6, "perplexity": 41.02},
        "zeroed": {"accuracy": 0.1},
        "teacher": {"seconds": 3.0},
    }
    summary |= {"metrics": own, "baselines": against}
    model = f"toy, step {summary['reported']['step']}"
    assert measured(summary) == [
        ("", "accuracy", "perplexity"), (model, "0.9000", "9.9300"), ("4-shot", "0.6000", "41.0200"), ("zeroed", "0.1000", ""),
    ]  # fmt: skip
    each = {f"recall/{i}": 0.5 for i in range(10)}
    wide = summary | {"metrics": own | each, "baselines": {"4-shot": against["4-shot"] | each}}
    assert measured(wide)[0] == ("", "accuracy", "perplexity"), "a column for each class"
    assert "41.02" not in page(folder)
    put(folder / "summary.json", summary)
    text = page(folder)
    holds(text, "perplexity</th>", "9.9300", "41.0200")
    assert "| 4-shot | 0.6000 | 41.0200 |" in against_lines(summary)
    assert "| this model | 0.9000 | 9.9300 |" in against_lines(summary)


def test_text_is_escaped_and_secrets_are_hidden(folder: Path):
    text = page(folder)
    assert "<b>" not in re.sub(r"<b title=", "", text)
    assert "&lt;b&gt;" in text
    assert "hf_abcdef" not in text
    assert "abc-secret" not in text


def test_a_failed_gate_is_the_headline_with_causes_and_the_next_command(folder: Path):
    for name in ("summary.json", "step_metrics.jsonl", "epoch_metrics.jsonl", "card.md"):
        (folder / name).unlink()
    gates = json.loads((folder / "gates.json").read_text())
    gates["gates"][1].update(verdict="fail", remedy="softmax before cross-entropy\nthe rate is too low")
    put(folder / "gates.json", gates)
    (folder / "gates" / "overfit").mkdir(parents=True)
    save_png(folder / "gates" / "overfit" / "batch.png")
    text = page(folder)
    assert "Stopped before training: overfit failed" in text
    assert "No training step was made" in text
    assert "<li>softmax before cross-entropy</li>" in text
    assert "Likely cause (overfit): softmax before cross-entropy. Other causes" in text
    assert "trainworthy check toy --train.epochs 10 --only overfit" in text
    assert text.index(">overfit<") < text.index(">schema<"), "failures come first"
    assert "the batch that overfit used" in text


def test_an_exception_that_ends_many_gates_has_one_card(folder: Path):
    gates = json.loads((folder / "gates.json").read_text())
    for verdict in gates["gates"]:
        verdict.update(verdict="fail", measured="raised ValueError: <no>", remedy='mine.py:7: f("<x>")',
                       evidence={"traceback": ["Traceback:\n", '  File "mine.py", line 7\n']})  # fmt: skip
    put(folder / "gates.json", gates)
    text = page(folder)
    assert text.count("raised ValueError: &lt;no&gt;") == 1
    assert text.count("raised what schema raised") == len(gates["gates"]) - 1
    assert text.count("Likely causes, in order") == 1
    assert "Traceback:\n  File &quot;mine.py&quot;, line 7" in text, "as lines of text"


def test_an_interrupted_run_says_so_and_how_to_resume(folder: Path):
    (folder / "summary.json").unlink()
    best = folder / "checkpoints" / "main" / "best_val_accuracy"
    best.mkdir(parents=True)
    put(best / "info.json", {"metric": "accuracy", "value": 0.85, "step": 32})
    (folder / "checkpoints" / "main" / "step-40").mkdir()
    lines(folder / "epoch_metrics.jsonl", epochs([0.5, 0.7, 0.8, 0.85, 0.84]))
    lines(folder / "step_metrics.jsonl", [{"step": 40, "step/loss": 1.0}])
    with (folder / "step_metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "st')  # killed while writing
    text = page(folder)
    assert "Not finished: step 40 of 1,250" in text
    assert "newest weights, step 40 (unfinished)" in text
    assert f"trainworthy resume {folder}" in text


@pytest.mark.parametrize(
    ("gates", "shown"),
    [
        ({"enabled": False, "gates": []}, "Gates were OFF"),
        (None, "the gates did not finish"),
        ("{half", "the gates did not finish"),
    ],
)
def test_gates_that_are_off_or_unfinished_are_never_a_pass(folder: Path, gates: object, shown: str):
    path = folder / "gates.json"
    path.unlink() if gates is None else path.write_text(gates if isinstance(gates, str) else json.dumps(gates))
    text = page(folder)
    assert shown in text
    assert "gates passed" not in text


def test_a_check_folder_and_an_empty_one_have_pages_too(folder: Path, tmp_path: Path):
    checks = tmp_path / "runs" / "toy" / "checks" / "1"
    checks.mkdir(parents=True)
    for name in ("args.json", "gates.json", "data.json"):
        (checks / name).write_text((folder / name).read_text())
    assert "Gates only: nothing was trained" in page(checks)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "Not trained yet" in page(empty)


def test_waived_and_remembered_gates_show_it(folder: Path):
    gates = json.loads((folder / "gates.json").read_text())
    gates["gates"][0].update(remembered="2026-01-01 10:00", seconds=0.0)
    gates["gates"][1].update(verdict="waived", reason="known label noise")
    put(folder / "gates.json", gates)
    text = page(folder)
    holds(text, "1 of 2 gates passed, 1 waived", "known label noise", "passed on 2026-01-01 10:00")


def test_predictions_without_a_truth_are_not_called_so(folder: Path):
    """Episodes of a policy have none: what stands below each is the score that its recipe gives it."""
    assert "the prediction is right" in page(folder)
    shutil.rmtree(folder / "previews" / "val")
    text = page(folder)
    assert "the prediction is right" not in text
    assert "its score from 0% to 100%" in text


def test_monitors_have_their_own_table_and_their_advice_comes_among_the_next_steps(folder: Path):
    watched = {**GATE, "rows": "C9", "needed": "at most 50%", "remedy": "--optim.clip 3.1"}
    put(folder / "monitors.json", {"monitors": [
        {**watched, "id": "spikes", "title": "no loss spikes", "measured": "0 spikes"},
        {**watched, "id": "clipped", "title": "clipping is the exception", "verdict": "advice", "measured": "62% of steps clipped"},
    ]})  # fmt: skip
    text = page(folder)
    table = text[text.index('id="monitors"') :]
    assert table.index("clipped") < table.index("spikes"), "advice before passes"
    assert "--optim.clip 3.1" in table
    assert "62% of steps clipped" in text[: text.index('id="curves"')], "among the next steps"
    assert "2 of 2 gates passed" in text, "advice is no failed gate"
    watched.update(id="collapse", title="predictions vary", verdict="fail", measured="one class")
    put(folder / "monitors.json", {"monitors": [watched]})
    assert "collapse failed while training" in page(folder)


def test_what_else_the_data_report_knows_is_shown(folder: Path):
    data = json.loads((folder / "data.json").read_text())
    for split in data["splits"].values():
        split.update(
            notes={"unreadable files": "3 of 1,003 left out"}, repeats={"exact": 2, "near": 5, "near_pairs": []}
        )
        made_up = {"mean": 0.25, "min": 0.0, "max": 0.75}
        split["fields"]["text"] = {"role": "input", "dtype": "str", "non_finite_samples": 0, "fabricated": made_up,
                                   "lengths": {"words": {"min": 1, "95%": 77}}}  # fmt: skip
    shared = {"exact": 4, "near": 6, "chunks": 8, "longest_chunks": ["the cat sat on the mat"]}
    data["overlap"] |= {"near": 7, "texts": {"text": shared}}
    data["overlaps"] = {"test in train": {"exact": 11, "near": None, "groups": {}}}
    put(folder / "data.json", data)
    text = page(folder)
    holds(text, "train: unreadable files: 3 of 1,003 left out.", "near copies", "train: text: 0% to 75% of a sample", "77",
                  "8 shared chunks", "the cat sat on the mat", "test in train: 11 exact, near ones not comparable")  # fmt: skip


def test_every_set_of_weights_is_told_apart(folder: Path):
    text = page(folder)
    assert "Exported: the final weights, not chosen on the validation set" in text
    assert "2. best" in text
    assert "Stopped early: after 80 of 1,250 planned steps." in text
    args, summary = (json.loads((folder / f"{n}.json").read_text()) for n in ("args", "summary"))
    start = {"file": "base.safetensors", "share": 0.993, "missing": ["head.weight"], "mismatched": []}
    put(folder / "args.json", {**args, "start": start})
    put(folder / "summary.json", {**summary, "reported": {"weights": "best", "step": 64, "accuracy": 0.901}})
    text = page(folder)
    assert "Exported: the best weights, chosen on the same validation set, so the number is optimistic" in text
    assert "Fine-tuned from base.safetensors: 99.3% of the parameters loaded, 1 tensors left fresh." in text


def test_evidence_is_drawn_where_its_shape_is_known(folder: Path):
    gates = json.loads((folder / "gates.json").read_text())
    rates = list(np.geomspace(1e-6, 1, 40))
    losses = [*np.linspace(2.3, 0.5, 30), *np.linspace(0.6, 50, 9), "nan"]
    found = {
        "range-test": {"rates": rates, "losses": losses},
        "tiny-data": {"curve": [0.1, 0.5, 0.9]},
        "terms": {"gradient": {"ce": 0.9, "z": 0.1}, "loss": {"ce": 1.0, "z": 0.0}},
    }
    gates["gates"] += [{**GATE, "id": k, "evidence": v} for k, v in found.items()]
    put(folder / "gates.json", gates)
    text = page(folder)
    assert "Loss while the rate rises from 1.0e-06 to 1.0e+00, lowest at" in text
    assert "Probe, 0.1000 to 0.9000 at 3." in text
    assert "Share of the gradient" in text
    assert "1e-06, 1.4" not in text, "what is drawn is not printed as numbers too"
    assert "mathdefault" not in text, "powers on a logarithmic axis are numbers"


def test_long_runs_stay_small_and_end_where_the_run_ended(folder: Path):
    x, y = bands.thin(np.arange(100_000.0), np.arange(100_000.0))
    assert len(x) <= bands.POINTS
    assert (x[0], y[-1]) == (0, 99_999)
    lines(
        folder / "step_metrics.jsonl",
        [{"step": i, "step/loss": 1 + (i % 7), "step/grad_norm": 1.0} for i in range(20_000)],
    )
    assert len(page(folder)) < 400_000


# --------------------------------------------------------------------------------------------- the band of healthy runs
def trained(
    out: Path, recipe: Path, seed: int, *, loss: float = 0, accuracy: float = 0, until: int = 20, epochs=20
) -> Path:
    """A run folder of `until` epochs of 10 steps that learns as its seed says; from epoch 8 on off by `loss` and `accuracy`."""
    noise, run = np.random.default_rng(seed), out / f"seed-{seed}"
    run.mkdir(parents=True)
    step, epoch = np.arange(1, 10 * until + 1), np.arange(1, until + 1)
    losses = 2.3 * np.exp(-step / 40) + 0.05 * noise.standard_normal(len(step)) + loss * (step >= 80)
    right = 1 - 0.9 * np.exp(-epoch / 4) + 0.005 * noise.standard_normal(until) + accuracy * (epoch >= 8)
    rows = [{"step": int(s), "step/loss": v, "step/grad_norm": 1.0} for s, v in zip(step, losses, strict=True)]
    lines(run / "step_metrics.jsonl", rows)
    rows = [
        {"step": 10 * int(e), "epoch": int(e), "val/accuracy": v, "train/loss": 1.0}
        for e, v in zip(epoch, right, strict=True)
    ]
    lines(run / "epoch_metrics.jsonl", rows)
    overfit = [[s, 2.3 * math.exp(-s / 10) + 0.02 * noise.random(), None] for s in range(0, 50, 10)]
    put(run / "gates.json", {"enabled": True, "gates": [{**GATE, "id": "overfit", "evidence": {"curve": overfit}}]})
    put(run / "data.json", {"splits": {}, "fingerprint": "f"})
    put(run / "environment.json", {"versions": {"torch": "2.14"}})
    settings = {"train": {"epochs": epochs, "batch_size": 8}, "run": {"seed": seed}, "optim": {"lr": 1e-3}}
    put(run / "args.json", {"recipe": str(recipe), "preset": "tiny", "settings": settings})
    result = {"accuracy": right[-1]}
    ends = {
        "recipe": "toy",
        "reported": {"weights": "final", "step": 200, **result},
        "metrics": result,
        "final": rows[-1],
    }
    put(run / "summary.json", {**SUMMARY, **ends, "steps": 200, "epochs": 20, "train_seconds": 1.0})
    return run


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe file with the band of five healthy runs beside it, made by the command."""
    path = tmp_path / "toy.py"
    path.write_text("STAGES = []\n")
    monkeypatch.setattr(command, "run_seed", lambda recipe, seed, settings, out: trained(out, path, seed))
    command.main(["reference", str(path)])
    return path


def test_a_healthy_run_stays_within_the_band_and_is_drawn_over_it(recipe: Path, tmp_path: Path):
    assert (recipe.parent / "results" / "toy.band.json").stat().st_size < 20_000
    for seed in range(10, 30):
        run = read(trained(tmp_path / "runs", recipe, seed))
        assert not bands.healthy(run).departures(run), seed
    text = page(run.path)
    assert "Within the band of healthy runs (5 seeds" in text
    assert text.count("healthy runs, 5 seeds</text>") == 5, (
        "loss, metric, gradient norm, all against the band, overfit gate"
    )


def test_leaving_the_band_is_told_with_place_and_direction(recipe: Path, tmp_path: Path):
    text = page(trained(tmp_path / "runs", recipe, 9, loss=0.3, accuracy=-0.1))
    told = re.search(r"Left the band of healthy runs \(.*?\): training loss above the band from step (\d+) on; "
                     r"accuracy below the band from epoch 8 on", text)  # fmt: skip
    assert told, text[text.index("Left the band") :][:300]
    assert 70 <= int(told[1]) <= 85
    assert text.index("It left the band of healthy runs") < text.index("</li>"), "the most urgent advice"
    better = page(trained(tmp_path / "better", recipe, 9, accuracy=0.1))
    assert "accuracy above the band from epoch 8 on" in better
    assert "It left the band" not in better


def test_half_a_run_is_compared_as_far_as_it_came(recipe: Path, tmp_path: Path):
    run = trained(tmp_path / "runs", recipe, 9, until=7)
    (run / "summary.json").unlink()
    assert "Within the band of healthy runs" in (text := page(run))
    assert "so far" in text


def test_the_band_is_drawn_only_over_runs_of_the_same_length_and_data(recipe: Path, tmp_path: Path):
    longer = page(trained(tmp_path / "a", recipe, 9, epochs=40))
    assert "is not drawn: train.epochs 40 (band: 20)" in longer
    assert "healthy runs, 5 seeds</text>" not in longer
    other = trained(tmp_path / "b", recipe, 9)
    put(other / "data.json", {"splits": {}, "fingerprint": "g"})
    args = json.loads((other / "args.json").read_text())
    args["settings"]["optim"]["lr"] = 1e-5
    put(other / "args.json", args)
    assert "is not drawn: other data. Settings that differ from those runs: optim.lr 1e-05 (band: 0.001)." in page(
        other
    )
    (recipe.parent / "results" / "toy.band.json").unlink()
    assert "the band" not in page(other)


def test_other_settings_than_the_bands_are_named(recipe: Path, tmp_path: Path):
    run = trained(tmp_path / "runs", recipe, 9, loss=0.3)
    args = json.loads((run / "args.json").read_text())
    args["settings"]["optim"]["lr"] = 1e-5
    put(run / "args.json", args)
    assert "Settings that differ from those runs: optim.lr 1e-05 (band: 0.001)." in page(run)


def test_the_band_that_ships_fits_the_recipe_it_lies_beside(launch):
    run = read(launch("check", "vision/classify", "--only", "overfit").folder())
    known = bands.healthy(run)
    assert known is not None
    assert (known.unlike, known.differs) == ("", ""), (
        "made with other settings or data: trainworthy reference vision/classify"
    )
    assert not known.departures(run)
    assert set(known.bands) == {"step/loss", "step/grad_norm", "val/accuracy", "val/nll", bands.OVERFIT}


def test_a_band_of_two_runs_is_refused():
    with pytest.raises(UserError, match="3 or more"):
        command.main(["reference", "vision/classify", "--seeds", "2"])


def test_one_evaluation_has_an_axis_of_whole_steps_and_of_the_metric(folder: Path):
    """A score of 0 was drawn between -0.06 and 0.06, and steps had halves."""
    lines(folder / "epoch_metrics.jsonl", [{"step": 20, "val/accuracy": 0.0}])
    lines(folder / "step_metrics.jsonl", [{"step": i + 1, "step/loss": 2.0 - i / 20} for i in range(20)])
    summary = json.loads((folder / "summary.json").read_text())
    put(folder / "summary.json", summary | {"floor": 0.0, "ceiling": 1.0, "metric": "accuracy", "baselines": {}})
    drawn = {c.name: c for c in charts.charts(read(folder), None)}
    text = {name: charts.drawing(drawn[name]) for name in ("metric", "loss")}
    ticks = {name: re.findall(r"<text[^>]*>([^<]+)</text>", svg) for name, svg in text.items()}
    assert {"0.0", "1.0"} <= {*ticks["metric"]}, ticks
    assert not [t for t in ticks["metric"] if t.startswith("\\u2212")], ticks
    assert {"5", "10", "15", "20"} <= {*ticks["loss"]}, ticks
