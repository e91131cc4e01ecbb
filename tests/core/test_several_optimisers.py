"""A stage with several optimisers: `run.update` steps all of them on one gradient, or the one that it is given by name."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainworthy.core.loop import shard, update

from tests.conftest import ROOT
from tests.helpers.commands import QUICK, trainworthy

ONE = 'optimizers={"main": core.make_optimizer(model, cfg.optim)}'
PLAIN = "torch.optim.AdamW([p for p in model.parameters() if {}], lr=cfg.optim.lr, weight_decay=0.05)"
TWO = f'optimizers={{"head": {PLAIN.format("p.ndim == 2")}, "rest": {PLAIN.format("p.ndim != 2")}}}'
MUON = TWO.replace("torch.optim.AdamW", "torch.optim.Muon", 1)
UPDATE = "run.update(stage, step.batches)"
LOSS = 'return {"ce": F.cross_entropy(logits, batch["label"], label_smoothing=cfg.label_smoothing, reduction="sum")}'


def forked(folder: Path, *hunks: tuple[str, str]) -> Path:
    source = (ROOT / "recipes" / "vision" / "classify.py").read_text()
    for old, new in hunks:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / "mine.py"
    path.write_text(source)
    return path


def trained(*groups: slice) -> dict[str, torch.Tensor]:
    """Weights after five clipped updates of a small net, with an AdamW for each slice of its parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    parameters = [*model.parameters()]
    cfg = SimpleNamespace(optim=SimpleNamespace(clip=0.05), train=SimpleNamespace(compile=False))
    run = SimpleNamespace(world=1, shard=shard.NONE, rehearsal=None, scaler=torch.amp.GradScaler("cpu", enabled=False), cfg=cfg, precision="fp32",
                          device=torch.device("cpu"), mode=SimpleNamespace(compiles=False), log_update=lambda *_, **__: None)  # fmt: skip
    stage = SimpleNamespace(
        model=model, wrapped=None, counts=lambda batch: {"*": len(batch["x"])},
        optimizers={str(i): torch.optim.AdamW(parameters[group], lr=0.01) for i, group in enumerate(groups)},
        loss=lambda model, batch: {"squares": (model(batch["x"]) - batch["y"]).square().sum()},
    )  # fmt: skip
    for _ in range(5):
        update.take(run, stage, [{"x": torch.randn(4, 6), "y": torch.randn(4, 3)}])
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        assert norm.item() == pytest.approx(0.05, rel=1e-4)
    return model.state_dict()


def test_two_that_share_the_weights_train_what_one_trains():
    """The gradient is clipped by one norm for both. Bitwise, because the order of the parameters is the same."""
    one, two = trained(slice(None)), trained(slice(2), slice(2, None))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_gates_are_quiet_on_muon_beside_adamw(tmp_path: Path):
    done = trainworthy(
        "check", forked(tmp_path, (ONE, MUON)), "--only", "wiring,schedule,accumulation,resume", cwd=tmp_path, code=0
    )
    assert "head 640, rest 77,178" in done.stdout


def test_one_that_never_steps_is_named(tmp_path: Path):
    path = forked(tmp_path, (ONE, MUON), (UPDATE, UPDATE.replace(")", ', optimizer="rest")')))
    done = trainworthy("check", path, "--only", "wiring", cwd=tmp_path, code=3)
    assert "optimiser 'head' never steps" in done.stdout
    assert "likely causes train() leaves an optimiser out" in done.stdout


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ('return F.cross_entropy(logits, batch["label"])', "the stage's loss returns no terms"),
        (LOSS.replace('"sum"', '"none"'), "the loss term 'ce' is not one number"),
    ],
    ids=["one tensor", "a value for each sample"],
)
def test_a_loss_that_returns_no_sums_is_refused(tmp_path: Path, made: str, words: str):
    done = trainworthy("run", forked(tmp_path, (LOSS, made)), *QUICK, cwd=tmp_path, code=2)
    assert words in done.stderr
    assert "sum over the batch's samples" in done.stderr
