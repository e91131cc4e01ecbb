"""A trainer's rate over its whole run, found without training it, and pairs whose sides are exchanged in one set."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from torch.optim import lr_scheduler
from trainworthy.core.base.verdict import Skip
from trainworthy.guard.adapters import trainer_rates
from trainworthy.guard.measures.trainers import preferred_tokens
from transformers import Trainer, TrainingArguments


def trainer(tmp_path, make=None, **arguments) -> Trainer:
    """160 steps: 4 epochs of 40 batches."""
    model = torch.nn.Linear(2, 2)
    data = Dataset.from_dict({"x": [[0.0, 1.0]] * 320, "label": [0] * 320})
    given = {"num_train_epochs": 4, "per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none", **arguments}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    passed = {"optimizers": (optimizer, make(optimizer))} if make else {}
    return Trainer(model=model, args=TrainingArguments(str(tmp_path), **given), train_dataset=data, **passed)


HEALTHY = {
    "linear": {},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 0.1},
    "constant with warm-up": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 60},
    "inverse root": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 10},
    "restarts": {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}},
    "polynomial": {"lr_scheduler_type": "polynomial"},
    "WSD": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 40},
        "warmup_steps": 10,
    },
    "one cycle": {"make": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=170)},
    "a step each epoch": {"make": lambda o: lr_scheduler.StepLR(o, 40, 0.1)},
    "exponential": {"make": lambda o: lr_scheduler.ExponentialLR(o, 0.98)},
    "cyclic": {"make": lambda o: lr_scheduler.CyclicLR(o, 1e-5, 1e-3, step_size_up=40)},
}
FAULTS = {
    "longer than the run": ({"warmup_steps": 2000}, "the warm-up is longer"),
    "most of the run": ({"warmup_steps": 0.9}, "the warm-up is longer"),
    "in epochs": ({"make": lambda o: lr_scheduler.StepLR(o, 2, 0.1)}, "counts epochs"),
    "cosine in epochs": ({"make": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.CosineAnnealingLR(o, 4), lr_scheduler.ConstantLR(o, 1e-6, 10**6)], [4])}, "counts epochs"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_schedules_in_use_are_quiet_and_put_back(name: str, tmp_path):
    one = trainer(tmp_path, **HEALTHY[name])
    made = one.lr_scheduler
    before = made and (made.state_dict(), [dict(g, params=None) for g in one.optimizer.param_groups])
    rates, total = trainer_rates.over_the_run(one, 4)
    assert total == 160
    assert trainer_rates.fault(rates, total, own=made is None) is None, rates[::10]
    assert made is one.lr_scheduler
    assert made is None or (made.state_dict(), [dict(g, params=None) for g in one.optimizer.param_groups]) == before


@pytest.mark.parametrize("name", FAULTS)
def test_schedules_of_another_run_are_named(name: str, tmp_path):
    settings, cause = FAULTS[name]
    one = trainer(tmp_path, **settings)
    found = trainer_rates.fault(*trainer_rates.over_the_run(one, 4), own=one.lr_scheduler is None)
    assert found is not None
    assert cause in found[1]


def test_a_schedule_that_reads_the_evaluation_is_skipped(tmp_path):
    with pytest.raises(Skip, match="what the evaluation measures"):
        trainer_rates.over_the_run(trainer(tmp_path, make=lr_scheduler.ReduceLROnPlateau), 4)


def pairs(n: int, seed: int, *, exchanged: bool = False, skill: float = 0.9) -> Dataset:
    """Answers in which one of ten tokens is preferred in `skill` of the pairs."""
    draw = torch.Generator().manual_seed(seed)
    rows: dict[str, list] = {"chosen_ids": [], "rejected_ids": []}
    for _ in range(n):
        texts = [torch.randint(10, 200, (12,), generator=draw).tolist() for _ in range(2)]
        good = int(torch.rand(1, generator=draw).item() >= skill)
        texts[good][0] = int(torch.randint(0, 10, (1,), generator=draw))
        for side, text in zip(("chosen_ids", "rejected_ids"), texts[::-1] if exchanged else texts, strict=True):
            rows[side].append(text)
    return Dataset.from_dict(rows)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("val", "fault"), [({}, False), ({"exchanged": True}, True), ({"skill": 0.5}, False)])
def test_pairs_that_are_exchanged_in_one_set(val: dict, fault: bool, seed: int):
    one = SimpleNamespace(train_dataset=pairs(600, seed), eval_dataset=pairs(200, 100 + seed, **val))
    assert bool(preferred_tokens.exchanged(one)) == fault
