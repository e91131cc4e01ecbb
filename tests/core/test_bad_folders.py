"""`report` on folders that are cut off, edited or another tool's: a page, or one clear message; never a traceback."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.core.test_report import epochs, folder, lines, put  # noqa: F401  (a fixture)
from tests.core.test_seeds import group
from tests.helpers.commands import assert_refused, execute, holds

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
    assert_refused(launch(command, str(run)), "not a run folder of trainworthy")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"recipe": "vision/cl', '{"recipe": "a", "argv": [], "seeds": 3, "at_once": 1}']
)
@pytest.mark.parametrize("command", ["report", "compare", "resume"])
def test_a_group_whose_plan_is_cut_off_is_refused_with_one_message(command: str, text: str, launch, tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "seeds.json").write_text(text)
    done = launch(command, *[str(tmp_path / "theirs")] * (2 if command == "compare" else 1), code=2)
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
    launch("report", str(folder), code=0)
    text = (folder / "report.html").read_text()
    holds(text, "Stop: the metric is no longer a number", "Not finished: step 82", "schema")


def test_a_seed_without_a_finite_score_is_left_out_of_its_group(launch, tmp_path: Path):
    """A mean with NaN is NaN. `--json` prints what every JSON reader takes."""
    group(tmp_path / "a", [0.9, 0.92, math.nan])
    group(tmp_path / "b", [0.95, 0.96, 0.97])
    done = launch("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", code=0)
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (found["a"]["missing"], found["b"]["missing"]) == ([2], [])
    assert found["difference"]["value"] == pytest.approx(0.05)


AS_OTHERS = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if getattr(os, "geteuid", lambda: 1)() == 0 else []
)
"""Root without its right to read and write what it is not permitted to."""


@pytest.mark.skipif(bool(AS_OTHERS) and not shutil.which("setpriv"), reason="root may read everything")
@pytest.mark.parametrize("command", ["report", "repro", "resume", "profile"])
def test_a_folder_that_may_not_be_read_gets_one_message(command: str, tmp_path: Path):
    """That is no file that is cut off."""
    run = tmp_path / "theirs"
    run.mkdir()
    (run / "args.json").write_text("{}")
    (run / "args.json").chmod(0)
    done = execute(*AS_OTHERS, sys.executable, "-m", "trainworthy", command, run, cwd=tmp_path)
    assert_refused(done, "args.json: Permission denied")
