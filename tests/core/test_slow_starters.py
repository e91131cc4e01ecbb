"""Trainers whose chance level is not 0 and whose first hundred steps show little: healthy, and let through."""

import warnings
from functools import cache
from pathlib import Path

import pytest

import trainworthy
from tests.core.test_hosted import classifier
from tests.helpers import language


@cache
def reviews():
    """Which half of the alphabet does the first letter come from? One class three times as often as the other."""
    from datasets import Dataset

    words = ("plot", "music", "cast", "light", "sound", "pace")
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz" if c <= "m" or c in "nqtw"]
    rows = [
        {
            "text": f"{letters[i * 5 % 17]} {letters[i * 5 % 17]} {words[i % 6]} {words[i * 7 % 5]} {i}",
            "label": int(letters[i * 5 % 17] > "m"),
        }
        for i in range(400)
    ]
    return Dataset.from_list(rows).train_test_split(120, seed=0)


def binary(lr: float, warmup: int = 0):
    """The documentation's classifier on more reviews."""
    trainer, tokenizer = classifier(), language.tokenizer()
    data = reviews().map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True)
    trainer.train_dataset, trainer.eval_dataset = data["train"], data["test"]
    trainer.args.learning_rate, trainer.args.warmup_steps, trainer.args.num_train_epochs = lr, warmup, 3
    return trainer


@pytest.fixture(autouse=True)
def quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.mark.parametrize(("lr", "warmup"), [pytest.param(5e-3, 0, marks=pytest.mark.verify), (3e-4, 60)])
def test_a_healthy_binary_classifier_is_let_through(lr: float, warmup: int):
    """Chance was taken as 0: "labels shuffled before the split" after 20 steps at an accuracy of a third."""
    gates = ("overfit", "baseline", "tiny-data")
    found = trainworthy.check(lambda: binary(lr, warmup), only=gates, raises=False)
    assert [v.verdict for v in found.verdicts] == ["pass"] * 3, found.table()
