"""Batch norm: its running statistics beside those of a batch, at the end of a run."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainworthy.core.gates.checks.batch_norm import by_batch
from trainworthy.core.monitoring import monitors
from trainworthy.core.recipe.stage import Metric

import trainworthy
from tests.core.planted_norms import PLANTS, normalised
from tests.core.test_check import TRAIN, script
from tests.helpers import commands
from tests.helpers.commands import read, run_folder
from tests.vision.planted_classify import STAGES

SHORT = ("--train.epochs", "1", "--gates.no-enabled", "--run.no-tensorboard")


def test_by_batch_moves_nothing():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    x = torch.randn(8, 3) * 5 + 3
    before = {k: v.clone() for k, v in model.state_dict().items()}
    alone = model(x)
    with by_batch(model), torch.no_grad():
        out = model(x)
        assert torch.allclose(out.mean(0), torch.zeros(4), atol=1e-5)  # by the batch, and without dropout
        assert model(x[:1]).shape == (1, 4)  # one value of each channel: by what runs
    model.eval()
    assert torch.equal(model(x), alone)
    assert model[1].momentum == 0.1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_its_verdict():
    accuracy, loss = Metric("accuracy", "", 0.1, 1.0), Metric("loss", "", 2.3, 0.0, higher_is_better=False)
    said = [monitors.Norms(*n).verdict().verdict for n in ((accuracy, 0.5, 0.9), (accuracy, 0.9, 0.5), (accuracy, 0.9, 0.95),
                                                           (loss, 2.0, 0.4), (loss, 0.4, 0.5))]  # fmt: skip
    assert said == ["advice", "pass", "pass", "advice", "pass"]


@pytest.mark.parametrize(("momentum", "verdict"), [(0.1, "pass"), (1.0, "pass"), (0.0, "fail")])
def test_a_script_whose_length_nobody_knows(momentum: float, verdict: str):
    """Sixty-four samples in two batches: how often they come again is the script's own affair."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=momentum), nn.ReLU(), nn.Linear(64, 10))

    few = TensorDataset(*(t[:64] for t in TRAIN.tensors))
    found = trainworthy.check(script(net, train=few), only="batch-norm", raises=False).verdicts[0]
    assert found.verdict == verdict, found.measured or found.reason


@pytest.mark.verify
def test_a_run_whose_statistics_lag_is_told(fork, tmp_path: Path):
    """The same two nets, one with a momentum that follows and one without: nothing else tells them apart while they train."""
    lags = next(p for p in PLANTS if p.id == "statistics-never-arrive")
    found = {}
    for name, hunk in (("follows", (STAGES, normalised())), ("lags", lags.hunk)):
        fork(hunk)
        done = commands.trainworthy("run", "mine.py", *SHORT, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        folder = run_folder(tmp_path)
        found[name] = next(m for m in read(folder / "monitors.json")["monitors"] if m["id"] == "batch-norm")
        folder.rename(tmp_path / name)
        (tmp_path / "mine.py").unlink()
    assert found["follows"]["verdict"] == "pass", found["follows"]["measured"]
    assert found["lags"]["verdict"] == "advice", found["lags"]["measured"]
