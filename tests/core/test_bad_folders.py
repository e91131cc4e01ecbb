"""`report` on folders that are cut off, edited or another tool's: a page, or one clear message; never a traceback."""

import json
from pathlib import Path

import pytest

from tests.core.test_report import epochs, folder, lines, put  # noqa: F401  (a fixture)

TEXTS = ["", "[]", "null", '{"learning_rate": 1e-3}', '{"recipe": "toy", "pres']


@pytest.mark.parametrize(
    ("command", "text"),
    [
        *(("report", text) for text in TEXTS),
        *(("profile", text) for text in (None, "", '{"recipe": 3}', '{"recipe": "vision/cl')),
        *(("repro", text) for text in (None, "", "[]", '{"recipe": "vision/classify"}', '{"recipe": "vision/cla')),
    ],
)
def test_a_folder_of_another_tool_is_refused_with_one_message(command: str, text: str | None, launch, tmp_path: Path):
    run = tmp_path / "theirs"
    run.mkdir()
    if text is not None:
        (run / "args.json").write_text(text)
    done = launch(command, str(run))
    assert done.returncode == 2, done.shown
    assert "not a run folder of trainworthy" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"recipe": "vision/cl', '{"recipe": "a", "argv": [], "seeds": 3, "at_once": 1}']
)
@pytest.mark.parametrize("command", ["report", "compare", "resume"])
def test_a_group_whose_plan_is_cut_off_is_refused_with_one_message(command: str, text: str, launch, tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "seeds.json").write_text(text)
    done = launch(command, *[str(tmp_path / "theirs")] * (2 if command == "compare" else 1))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.shown
    assert "is no group of seeds" in done.stderr


def test_rows_that_are_cut_off_no_numbers_or_not_ours_leave_a_page(folder: Path, launch):  # noqa: F811
    """A metrics file cut in the middle of a line, NaN rows, rows without an epoch, half of a JSON file, lists for objects."""
    rows = epochs([0.5, 0.7, 0.8, 0.85, 0.88])
    lines(
        folder / "epoch_metrics.jsonl",
        [*rows, {"step": 48, "val/accuracy": None}, {"step": 56, "epoch": 7, "val/accuracy": "nan"}],
    )
    with (folder / "epoch_metrics.jsonl").open("ab") as file:
        file.write(b'3\n[]\nnull\n{"step": null}\n{"step": "x"}\n\xff\xfe{"step": 64, "val/acc')
    with (folder / "step_metrics.jsonl").open("a") as file:
        file.write('{"step": 81, "step/loss": NaN}\n{"step": 82, "step/loss": null}\n{"step": 83, "st')
    summary = json.loads((folder / "summary.json").read_text())
    del summary["train_seconds"]
    put(folder / "summary.json", summary)
    put(folder / "monitors.json", [])
    put(folder / "gates.json", {"gates": [{"id": "schema", "verdict": "pass"}, 3]})
    put(folder / "data.json", {"splits": {"train": 3}, "overlap": {}})
    (folder / "environment.json").write_text('{"versions": {')
    (folder / "previews" / "train" / "captions.json").write_text("{}")
    done = launch("report", str(folder))
    assert done.returncode == 0, done.shown
    text = (folder / "report.html").read_text()
    assert "Stop: the metric is no longer a number" in text
    assert "Not finished: step 82" in text
    assert "schema" in text
