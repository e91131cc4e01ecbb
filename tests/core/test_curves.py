"""The report's advice on curves that real runs recorded, and on runs of other tools.

tests/fixtures/curves/*.jsonl: a line of facts (what was run, the advice that is right), then the rows of its evaluations.
The rules were corrected on these. Those in unseen/ only measure them: a miss there is a row in the table and no failure.
`python -m tests.core.test_curves` writes the table of docs/decide.md.
"""

import json
import math
import re
from pathlib import Path

import pytest
from trainworthy.core.report.advice import Advice, advise, against_healthy, landing, trend
from trainworthy.core.report.folder import Folder

from tests.conftest import ROOT
from tests.helpers.commands import assert_refused

CURVES = sorted((ROOT / "tests" / "fixtures" / "curves").glob("*.jsonl"))
UNSEEN = sorted((ROOT / "tests" / "fixtures" / "curves" / "unseen").glob("*.jsonl"))
"""Curves that no rule was changed for. Their right advice was written down before the report's was looked at."""
PAGE = ROOT / "docs" / "decide.md"


def curve(path: Path) -> tuple[dict, list[dict]]:
    facts, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return facts, rows


def advice(path: Path) -> list[Advice]:
    """As the report puts it: what a run's own curves say, and before that if it is behind the recorded band of its recipe."""
    facts, rows = curve(path)
    found = advise(rows, facts["summary"], facts["settings"], facts["n_val"], own_samples=facts["own_samples"])
    if behind := against_healthy(folder(facts, rows)):
        found.insert(0 if behind.urgent else len(found), behind)
    return found


def folder(facts: dict, rows: list[dict]) -> Folder:
    """A run of the recipe in `band` with that recipe's settings but for those of the curve, and its data; without `band`, one that has none."""
    band = {}
    if "band" in facts:
        band = json.loads((ROOT / "recipes" / f"{facts['band'].replace('/', '/results/')}.band.json").read_text())
    settings: dict = {}
    for name, value in band.get("settings", {}).items():
        group, _, key = name.rpartition(".")
        (settings.setdefault(group, {}) if group else settings)[key] = value
    for group, values in facts["settings"].items():
        settings[group] = {**settings.get(group, {}), **values}
    data = {"fingerprint": band.get("data")}
    return Folder(Path("run"), {"settings": settings}, {}, data, {}, facts["summary"], [], rows, [], band)


@pytest.mark.parametrize("path", CURVES, ids=lambda p: p.stem)
def test_the_advice_on_a_recorded_curve_is_right(path: Path):
    facts, _ = curve(path)
    found = advice(path)
    verdicts = [a.title for a in found if not a.title.startswith("Do not use it yet")]
    assert verdicts[0] == facts["expect"], [f"{a.title}: {a.evidence}" for a in found]
    for one in found:  # numbers that a reader can believe
        assert not re.search(r"e-1[0-9]|,\d{3},\d{3} standard errors|nan", one.evidence), one.evidence


def test_every_kind_of_curve_is_there():
    kinds = {p.stem.split("-")[0] for p in CURVES}
    assert {
        "healthy",
        "improving",
        "levelled",
        "overfitting",
        "diverging",
        "plateau",
        "nothing",
        "noisy",
        "saturated",
        "collapsed",
        "below",
    } <= kinds
    assert len(CURVES) > 15


def landings() -> list[tuple[str, float, float, float, float]]:
    """(curve, share of the run seen, error of the straight line, error of the last value, range of the metric)."""
    found = []
    for path in (*CURVES, *UNSEEN):
        facts, rows = curve(path)
        key, s = f"val/{facts['summary']['metric']}", facts["summary"]
        if s.get("unfinished") or len(rows) < 8:
            continue
        values = [r[key] for r in rows]
        if max(values) - min(values) < 1e-6 * max(map(abs, values)):
            continue  # at its ceiling from the first evaluation on
        for share in (0.5, 0.75):
            seen = rows[: math.ceil(share * len(rows))]
            t = trend(seen, s, facts["n_val"])
            line = landing(t, s, rows[-1]["epoch"] - seen[-1]["epoch"])
            found.append(
                (path.stem, share, abs(line - values[-1]), abs(seen[-1][key] - values[-1]), max(values) - min(values))
            )
    return found


def test_the_landing_point_is_compared_with_the_last_value_and_the_docs_say_how_it_does():
    """The line may be worse than the naive last value; whatever it is, the page has the numbers of today's code."""
    assert len(landings()) >= 20
    for mark, lines in tables().items():
        assert f"{mark}\n\n{lines}\n\n" in PAGE.read_text(), "write them again: python -m tests.core.test_curves"


def first_title(path: Path) -> str:
    return next(a.title for a in advice(path) if not a.title.startswith("Do not use it yet"))


def verdicts(paths: list[Path]) -> list[str]:
    """A table: what was run, the report's first advice, whether it is right. `expect` may be the beginning of a title."""
    lines = ["| curve | what was run | first advice | right |", "|---|---|---|---|"]
    for path in paths:
        facts, title = curve(path)[0], first_title(path)
        right = "yes" if title.startswith(facts["expect"]) else f"NO: {facts['expect']}"
        lines.append(f"| {path.stem} | {facts['what']} | {title} | {right} |")
    return lines


def landing_errors() -> list[str]:
    """A table: mean error of the predicted final score, next to that of the last value."""
    lines = [
        "| seen of the run | runs | mean error of the straight line | mean error of the last value |",
        "|---|---|---|---|",
    ]
    for share in (0.5, 0.75):
        mine = [(line / width, last / width) for _, at, line, last, width in landings() if at == share]
        a, b = (sum(x) / len(mine) for x in zip(*mine, strict=True))
        lines.append(f"| {share:.0%} | {len(mine)} | {a:.0%} of the run's range | {b:.0%} |")
    return lines


def tables() -> dict[str, str]:
    """{comment that stands before a table of the page: the table}"""
    found = {"curves": verdicts(CURVES), "unseen": verdicts(UNSEEN), "landing": landing_errors()}
    return {f"<!-- {name} -->": "\n".join(lines) for name, lines in found.items()}


# ---------------------------------------------------------------------------------------------------------- other tools
def state(folder: Path, *, cut: bool = False) -> Path:
    """A trainer_state.json as transformers writes it, of a run that overfits from epoch 4 on."""
    log: list[dict] = []
    for epoch in range(1, 9):
        for k in range(1, 6):
            at = 5 * (epoch - 1) + k
            log.append(
                {
                    "epoch": at / 5,
                    "step": 10 * at,
                    "loss": 2 / (1 + 0.2 * at),
                    "learning_rate": 5e-5 * (1 - at / 40),
                    "grad_norm": 1.0,
                }
            )
        score = 0.5 + 0.1 * epoch if epoch < 5 else 0.9 - 0.03 * (epoch - 4)
        log.append(
            {
                "epoch": float(epoch),
                "step": 50 * epoch,
                "eval_accuracy": score,
                "eval_loss": abs(epoch - 4) / 10 + 1,
                "eval_runtime": 1.0,
            }
        )
    folder.mkdir(parents=True)
    text = json.dumps({"global_step": 400, "num_train_epochs": 8, "log_history": log})
    (folder / "trainer_state.json").write_text(text[: len(text) // 2] if cut else text)
    return folder


def test_report_reads_transformers_trainer_state(launch, tmp_path: Path):
    state(tmp_path / "out" / "checkpoint-400")
    done = launch("report", str(tmp_path / "out"), "--json", code=0)
    found = json.loads(done.stdout)
    assert (found["metric"], found["value"], found["steps"]) == ("accuracy", pytest.approx(0.78), 400)
    assert found["advice"][0]["title"] == "Stop: it is overfitting"
    assert "no gate was run" in found["verdict"]
    page = Path(found["page"]).read_text()
    assert "Read from" in page
    assert "seed ?" not in page
    loss = json.loads(
        launch(
            "report", str(tmp_path / "out" / "checkpoint-400" / "trainer_state.json"), "--metric", "loss", "--json"
        ).stdout
    )
    assert (loss["metric"], loss["advice"][0]["title"]) == ("loss", "Stop: it is overfitting")
    assert_refused(launch("report", str(tmp_path / "out"), "--metric", "f1"), "has no metric 'f1'")


def test_report_of_a_state_that_is_cut_off_is_one_message(launch, tmp_path: Path):
    assert_refused(launch("report", str(state(tmp_path / "out", cut=True))), "cannot be read")


def test_report_reads_a_tensorboard_folder_and_refuses_several_runs(launch, tmp_path: Path):
    from torch.utils.tensorboard import SummaryWriter

    for name in ("one", "two"):
        with SummaryWriter(str(tmp_path / "tb" / name)) as writer:
            for step in range(0, 200, 5):
                writer.add_scalar("train_loss", 2 / (1 + step / 50), step)
            for step in range(20, 201, 20):
                writer.add_scalar("val_acc", 0.5 + 0.002 * step, step)
    assert_refused(launch("report", str(tmp_path / "tb")), "holds several runs")
    done = launch("report", str(tmp_path / "tb" / "one"), "--json", code=0)
    found = json.loads(done.stdout)
    assert found["metric"] == "acc"
    assert found["advice"][0]["title"] == "Continue: it is still improving"
    lands = re.search(r"would reach ([\d.]+)", found["advice"][0]["evidence"])
    assert float(lands[1]) <= 1.0


if __name__ == "__main__":
    text = PAGE.read_text()
    for mark, lines in tables().items():
        before, after = text.split(f"{mark}\n\n")
        text = f"{before}{mark}\n\n{lines}\n\n{after.partition(chr(10) * 2)[2]}"
    PAGE.write_text(text)
