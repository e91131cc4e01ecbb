"""`trainworthy guard --restart`: a script that resumes from its checkpoint goes on with what it had."""

import pytest

from tests.conftest import patched
from tests.guard.guarding import guard
from tests.helpers.sampling import sample

SCRIPT = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
args = parser.parse_args()
torch.manual_seed(0)
x = torch.randn(512, 8) * 3
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 32, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.1)
start = 0
if args.resume:
    kept = torch.load(args.resume)
    start = kept["epoch"] + 1
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    scheduler.load_state_dict(kept["scheduler"])
for epoch in range(start, 30):
    model.train()
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        print("acc", sum((model(a).argmax(1) == b).sum().item() for a, b in loader) / 512)
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict()}, "last.pt")
"""
FROM = "--resume {checkpoint}"
HEALTHY = {
    "as it is": (),
    "saved before the scheduler": (
        ("    scheduler.step()\n", ""),
        ('"last.pt")\n', '"last.pt")\n    scheduler.step()\n'),
    ),
    "rate by hand": (("    scheduler.step()\n", "    for g in optimizer.param_groups:\n        g['lr'] *= 0.9\n"),),
}
BUGS = {
    "optimizer": ('    optimizer.load_state_dict(kept["optimizer"])\n', "optimiser's state is empty"),
    "scheduler": ('    scheduler.load_state_dict(kept["scheduler"])\n', "the schedule begins again"),
    "model": ('    model.load_state_dict(kept["model"])\n', "the checkpoint is not loaded"),
}


def resumed(source: str, folder, words: str = FROM) -> tuple:
    verdicts, output, _ = guard(
        source, folder, interventions=False, **{"--seconds": "0.3", "--restart": words, "--only": "resume"}
    )
    assert not (folder / "last.pt").exists()
    return verdicts["resume"], output


@pytest.mark.parametrize("name", sample(HEALTHY, "as it is"))
def test_restart_is_quiet(name, tmp_path):
    verdict, output = resumed(patched(SCRIPT, *HEALTHY[name]), tmp_path)
    assert verdict.verdict == "pass", output
    assert "saved after step" in verdict.measured


@pytest.mark.parametrize("name", sample(BUGS, "optimizer"))
def test_restart_stops_what_is_not_brought_back(name, tmp_path):
    line, words = BUGS[name]
    verdict, output = resumed(patched(SCRIPT, (line, "")), tmp_path)
    assert verdict.blocks, output
    assert words in output


@pytest.mark.verify
def test_restart_sees_lost_batch_statistics(tmp_path):
    """Parameters alone are saved and loaded."""
    source = patched(SCRIPT, ('"model": model.state_dict()', '"model": dict(model.named_parameters())'),
                     ('model.load_state_dict(kept["model"])', 'model.load_state_dict(kept["model"], strict=False)'))  # fmt: skip
    verdict, output = resumed(source, tmp_path)
    assert verdict.blocks, output
    assert "running statistics" in verdict.measured


@pytest.mark.verify
def test_restart_that_cannot_load_names_the_error(tmp_path):
    source = patched(SCRIPT, ("nn.BatchNorm1d(32)", "nn.BatchNorm1d(32) if not args.resume else nn.Identity()"))
    verdict, output = resumed(source, tmp_path)
    assert verdict.blocks, output
    assert "RuntimeError: Error(s) in loading state_dict" in verdict.measured


@pytest.mark.verify
def test_restart_skips_with_the_reason(tmp_path):
    """Nothing saved; or arguments that the script does not know."""
    verdict, _ = resumed(SCRIPT.partition("    torch.save")[0], tmp_path)
    assert verdict.verdict == "skip"
    assert "saved nothing" in verdict.reason
    verdict, _ = resumed(SCRIPT, tmp_path / "other", "--continue {checkpoint}")
    assert verdict.verdict == "skip"
    assert "did not train" in verdict.reason
