"""`trainworthy lr`: a band, a suggestion and a plot, or plainly none."""

import json
import re

from tests.conftest import Done
from tests.helpers.commands import assert_refused, read, trainworthy
from tests.vision.planted_classify import STAGES, staged


def test_suggestion_and_plot(launch):
    done: Done = launch("lr", "vision/classify", "--steps", "80", "--no-augment", code=0)
    folder = done.folder()
    found = read(folder / "plots" / "range_test_classify.json")
    assert 3e-4 < found["suggestion"] < 3e-2, "rates from 3e-4 to 3e-2 train this recipe"
    assert len(found["rates"]) == len(found["losses"]) <= 80
    assert (folder / "plots" / "range_test_classify.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"next +trainworthy run vision/classify .*--optim.lr", done.stdout)
    assert not (folder / "checkpoints").exists()


def test_no_usable_rate_is_said_and_is_no_error(launch, fork):
    fork(
        (
            STAGES,
            staged(
                "shown = stage.loss\nstage.loss = lambda m, b: {k: v * 0 + 2.3 * len(b['label']) for k, v in shown(m, b).items()}"
            ),
        )
    )
    done = launch("lr", "mine.py", "--steps", "20", code=0)
    assert "no usable rate" in done.stdout
    assert json.loads((done.folder() / "plots" / "range_test_classify.json").read_text())["suggestion"] is None


def test_a_declared_stage_is_not_tested(launch, fork):
    fork((STAGES, staged("stage.expect.range_test = 'DPO at 1e-6'")))
    done = launch("lr", "mine.py", code=0)
    assert "no range test: DPO at 1e-6" in done.stdout


def test_bad_steps(tmp_path):
    assert_refused(trainworthy("lr", "vision/classify", "--steps", "few", cwd=tmp_path), "--steps needs a number")
