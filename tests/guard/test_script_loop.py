"""`check` of a `Script`: its own loop on its own loader, at its own rates, for more than one epoch."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, Sampler
from trainworthy.guard.adapters import observed
from trainworthy.guard.adapters.script_stage import peaks

import trainworthy
from tests.core.test_check import TRAIN, VAL, accuracy, loss
from tests.helpers.commands import holds

EPOCHS, BATCHES = 20, 45


class Half(Sampler):
    """Draws the first half alone, in another order each epoch."""

    def __iter__(self):
        return iter(torch.randperm(len(TRAIN) // 2).tolist())

    def __len__(self) -> int:
        return len(TRAIN) // 2


def script(
    scheduler: Callable[[Any], Any] | None = None,
    *,
    per_batch: bool = False,
    clip: str = "",
    keep: Callable | None = None,
    train: Any = TRAIN,
) -> Callable[[], trainworthy.Script]:
    def factory() -> trainworthy.Script:
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = scheduler(optimizer) if scheduler else None
        best = []

        def epoch(model: nn.Module, optimizer: Any, batches: Iterable) -> None:
            model.train()
            for x, y in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if clip == "before":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                loss.backward()
                if clip == "behind":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if rates and per_batch:
                    rates.step()
            if rates and not per_batch:
                rates.step()
            best[:] = [keep(model.state_dict())] if keep else []

        return trainworthy.Script(
            model=model,
            optimizer=optimizer,
            train=train,
            val=VAL,
            loss=loss,
            metric=accuracy,
            train_loop=epoch,
            classes=10,
        )

    return factory


def copied(state: dict) -> dict:
    return {k: v.clone() for k, v in state.items()}


BUGS = {
    "step-per-batch": (script(lambda o: schedulers.StepLR(o, 1, gamma=0.7), per_batch=True), "schedule", "is stepped at every batch"),
    "exponential-per-batch": (script(lambda o: schedulers.ExponentialLR(o, 0.9), per_batch=True), "schedule", "is stepped at every batch"),
    "cosine-of-epochs-per-batch": (script(lambda o: schedulers.CosineAnnealingLR(o, EPOCHS), per_batch=True), "schedule", "T_max counts epochs"),
    "one-cycle-per-epoch": (script(lambda o: schedulers.OneCycleLR(o, 0.3, epochs=EPOCHS, steps_per_epoch=BATCHES)), "schedule",
                            "one step per batch"),
    "clipped-before": (script(clip="before"), "clipping", "found no gradients"),
    "best-by-reference": (script(keep=lambda state: state), "state", "changes with the weights"),
    "half": (script(train=DataLoader(TRAIN, 32, sampler=Half())), "samples", "never seen"),
}  # fmt: skip
HEALTHY = {
    "step-per-epoch": script(lambda o: schedulers.StepLR(o, 5, gamma=0.5)),
    "cosine-per-epoch": script(lambda o: schedulers.CosineAnnealingLR(o, EPOCHS), clip="behind", keep=copied),
    "cosine-per-batch": script(lambda o: schedulers.CosineAnnealingLR(o, EPOCHS * BATCHES), per_batch=True),
    "one-cycle": script(lambda o: schedulers.OneCycleLR(o, 0.3, epochs=EPOCHS, steps_per_epoch=BATCHES), per_batch=True,
                        train=DataLoader(TRAIN, 32, shuffle=True)),
    "restarts": script(lambda o: schedulers.CosineAnnealingWarmRestarts(o, 20), per_batch=True),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_what_the_loop_does_to_its_batches_and_rates_is_seen(name: str):
    factory, id, words = BUGS[name]
    (found,) = trainworthy.check(factory, only=id, raises=False).verdicts
    assert found.verdict == "fail", found
    assert words in found.measured + found.remedy, found


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_loops_are_quiet(name: str):
    found = trainworthy.check(HEALTHY[name], only=(*observed.OWN, *observed.OF_LOOPS))
    assert "pass" in {v.verdict for v in found.verdicts}


def test_a_loop_that_takes_no_loader_is_skipped_with_the_reason():
    def factory() -> trainworthy.Script:
        made = script()()
        own = made.train_loop
        made.train_loop = lambda model, optimizer, batches: own(
            model, optimizer, batches if hasattr(batches, "due") else batches.nothing
        )
        return made

    found = trainworthy.check(factory, only="schedule,clipping")
    assert [v.verdict for v in found.verdicts] == ["skip", "skip"]
    assert "raises on its own loader" in found.verdicts[0].reason


def test_the_command_has_the_checks_of_the_loop(tmp_path: Path, launch):
    (tmp_path / "train.py").write_text(
        "from tests.guard.test_script_loop import BUGS\n\n\ndef factory():\n    return BUGS['step-per-batch'][0]()\n"
    )
    done = launch("check", "train.py", "--only", "wiring,schedule", code=3, PYTHONPATH=str(Path(__file__).parents[2]))
    holds(done.stdout, "pass   wiring", "FAIL   schedule", "is stepped at every batch")


def test_the_peak_of_a_factor_that_is_the_rate_itself():
    """A base rate of 1 and the schedule of Vaswani et al.: gates that train with a constant rate take its peak, not 1."""

    def peak_of(base: float, factor: Callable[[int], float]) -> float:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], base)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        assert scheduler is not None
        return peaks(optimizer)[0]

    assert peak_of(1.0, lambda k: 3e-3 * min((k + 1) / 50, (50 / (k + 1)) ** 0.5)) == pytest.approx(3e-3)
    assert peak_of(0.1, lambda k: min(1.0, k / 50)) == pytest.approx(0.1)
    assert peak_of(0.1, lambda k: 0.95**k) == pytest.approx(0.1)
    assert peak_of(0.1, lambda k: [0.0, 0.5, 1.0][k]) == pytest.approx(0.1)  # it ends
