"""Stored boxes that belong to another picture, or to a smaller copy of theirs, are found without a model."""

import pytest
import torch
from trainworthy.recipes.vision.data import boxes
from trainworthy.recipes.vision.gates import placement

SIDE = 96


def scenes(n: int, seed: int, kind: str = "plain") -> tuple[list, list]:
    """Textured objects on a calmer ground, (pictures (3, H, W) uint8, boxes (k, 4)); `kind` says what is unusual about the objects."""
    draw = torch.Generator().manual_seed(seed)
    pictures, found = [], []
    for _ in range(n):
        image = 110 + 10 * torch.randn(3, SIDE, SIDE, generator=draw)
        image += 40 * torch.randn(3, 6, 6, generator=draw).repeat_interleave(16, 1).repeat_interleave(16, 2)
        own = []
        for _ in range(int(torch.randint(1, 4, (), generator=draw))):
            w, h = (int(v) for v in torch.randint(12, 32, (2,), generator=draw))
            most = SIDE // 2 if kind == "corner" else SIDE
            x, y = (int(torch.randint(max(1, most - s), (), generator=draw)) for s in (w, h))
            rough = 2.0 if kind == "smooth" else 35.0
            image[:, y : y + h, x : x + w] = 130 + rough * torch.randn(3, h, w, generator=draw)
            w, h = (w // 2, h // 2) if kind == "parts" else (w, h)
            own.append([x, y, x + w, y + h])
        pictures.append(image.clamp(0, 255).byte())
        found.append(torch.tensor(own, dtype=torch.float32))
    if kind == "anywhere":
        found = [found[i] for i in torch.randperm(n, generator=draw).tolist()]
    return pictures, found


def stored(pictures: list, found: list) -> boxes.Boxed:
    labels = [torch.zeros(len(b), dtype=torch.int64) for b in found]
    rows = list(range(len(found)))
    data = boxes.Annotated(
        pictures[: len(found)], [(SIDE, SIDE)] * len(found), found, labels, ("thing",), rows, rows, {}
    )
    return boxes.Boxed(data, rows, side=2 * SIDE)


@pytest.mark.parametrize("kind", ["plain", "smooth", "corner", "parts", "anywhere"])
def test_healthy_boxes_are_quiet(kind):
    assert not [*placement.faults(stored(*scenes(200, 0, kind)))]


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_boxes_of_thumbnails_are_found(share):
    pictures, found = scenes(250, 1)
    small = torch.rand(len(found), generator=torch.Generator().manual_seed(0)) < share
    ((fault, cause),) = placement.faults(
        stored(pictures, [b / 2 if s else b for b, s in zip(found, small, strict=True)])
    )
    assert "fit 2.00 times as large" in fault
    assert "about 2.0 times smaller" in cause


@pytest.mark.parametrize(("at", "lag"), [(60, 1), (0, 2)])
def test_boxes_of_the_next_picture_are_found(at, lag):
    pictures, found = scenes(260, 2)
    ((fault, cause),) = placement.faults(stored(pictures, found[:at] + found[at + lag :]))
    assert f"fits the input {lag} row" in fault
    assert f"moved by {lag}" in cause


def test_few_pictures_say_nothing():
    assert not [*placement.faults(stored(*scenes(20, 0)))]


def test_pictures_without_boxes_are_left_out():
    pictures, found = scenes(200, 3)
    found = [b if i % 3 else b[:0] for i, b in enumerate(found)]
    assert not [*placement.faults(stored(pictures, found))]
