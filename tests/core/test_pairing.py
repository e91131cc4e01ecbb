"""Targets that belong to another row, and copies with another class, are found without a model."""

import random

import torch
from trainworthy.core.data import inventory, pairing, texts
from trainworthy.core.recipe.stage import Data, Field

from tests.helpers.set_cases import digits, rows_of_docstrings


class Rows(Data):
    """Rows of text."""

    def __init__(self, rows: list[dict[str, str]]):
        self.rows, self.fields = rows, {"prompt": Field("input"), "completion": Field("target")}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index, generator):
        return self.rows[index]


class Pictures(Data):
    """Pictures with classes, or with masks."""

    def __init__(self, images, targets, key="label"):
        self.images, self.targets, self.key = images, targets, key
        role = Field("target", classes=[str(i) for i in range(10)]) if key == "label" else Field("target")
        self.fields = {"image": Field("input", low=0.0, high=1.0), key: role}

    def __len__(self) -> int:
        return len(self.targets)

    def get(self, index, generator):
        return {"image": self.images[index].float() / 255, self.key: self.targets[index]}


def test_a_deleted_cell_in_a_column_of_answers_is_found():
    rows = rows_of_docstrings(1200)
    assert pairing.moved(Rows(rows)) is None
    answers = [row["completion"] for row in rows]
    for at in (300, 900):
        said = answers[:at] + answers[at + 1 :]
        wrong = [{**row, "completion": a} for row, a in zip(rows, said, strict=False)]
        found = pairing.moved(Rows(wrong))
        if at == 300:
            assert found is not None
            assert (found.lag, found.target) == (1, "completion")
        back = [{**row, "completion": a} for row, a in zip(rows[at:], answers[: len(rows) - at], strict=True)]
        assert pairing.moved(Rows(back)) is None, "rows of no neighbour are not known to belong elsewhere"


def test_turns_of_a_conversation_are_no_fault():
    rows = rows_of_docstrings(800)
    turns = []
    for row in rows:  # each second row quotes the answer before it, and asks on
        turns.append({"prompt": "What is meant here?", "completion": row["prompt"]})
        turns.append({"prompt": f"What is meant here? {row['prompt']} And its name?", "completion": row["completion"]})
    assert pairing.moved(Rows(turns)) is None


def test_masks_of_the_next_picture_are_found():
    images, _ = digits()
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:400]]
    masks = (images > 127).long()
    images = images[:, None].expand(-1, 3, -1, -1)
    assert pairing.moved(Pictures(images, masks, "mask")) is None
    found = pairing.moved(Pictures(images, masks.roll(-1, 0), "mask"))
    assert found is not None
    assert found.lag == 1


def test_copies_with_another_class_are_found_and_digits_have_none():
    images, labels = digits()
    images, labels = images[::4, None], labels[::4]
    healthy = inventory.scan("train", Pictures(images, labels))
    assert inventory.torn_copies(healthy) is None
    noisy = (images[:100].float() + torch.randn(images[:100].shape, generator=torch.Generator().manual_seed(0))).clamp(
        0, 255
    )
    both = Pictures(torch.cat([images, noisy.byte()]), torch.cat([labels, (labels[:100] + 1) % 10]))
    found = inventory.torn_copies(inventory.scan("train", both))
    assert found is not None
    assert 0.9 * 200 <= found["samples"] <= 200


def test_pictures_that_all_look_alike_are_no_copies():
    """Defects on one surface: every picture is a near copy of every other."""
    draws = torch.Generator().manual_seed(0)
    surface = torch.rand(1, 1, 32, 32, generator=draws) * 200
    images = (surface + 3 * torch.randn(400, 1, 32, 32, generator=draws)).clamp(0, 255)
    found = inventory.scan("train", Pictures(images, torch.arange(400) % 10))
    assert inventory.torn_copies(found) is None


def test_texts_that_were_cut_are_found():
    said = [row["prompt"] for row in rows_of_docstrings(1000)]
    assert texts.cut_at(said) is None
    assert texts.cut_at([text[:60] for text in said])[0] == 60
    assert texts.cut_at([text for text in said if len(text) <= 60]) is None, "left out, not cut"
    assert texts.cut_at(["yes", "no"] * 200) is None
    names = [row["completion"] for row in rows_of_docstrings(1000)]
    assert texts.cut_at(names) is None
    assert texts.cut_at([name[:8] for name in names])[0] == 8
    assert texts.cut_at([name for name in names if len(name) <= 8]) is None, "left out, not cut"
    assert texts.cut_at([str(i) for i in range(100_000)]) is None, "nine tenths of numbers have the most digits"
    assert texts.cut_at([f"{i:032x}" for i in range(400)]) is None, "hashes have one length"
    assert texts.cut_at([text[:20].rstrip() for text in said if len(text) > 24])[0] == 20, (
        "all are cut, some at a space"
    )
    draws = random.Random(0)
    moves = [" ".join(draws.choice(("turn left", "turn back", "step left")) for _ in range(6)) for _ in range(400)]
    assert texts.cut_at(moves) is None, "texts of a template have one length"
