"""`boxes` and `own-pixels` of vision/detect on samples that show several pictures (mosaics)."""

import torch
from trainworthy.recipes.vision.gates import boxes

FOUR = torch.tensor([[2.0, 3, 14, 12], [20, 4, 30, 13], [3, 20, 12, 30], [18, 22, 28, 31]])


def batch(moved: float = 0, of_each: float = 1) -> dict:
    image = torch.full((10, 3, 32, 32), 0.15)
    for x0, y0, x1, y1 in FOUR.long().tolist():
        image[:, :, y0:y1, x0:x1] = 0.8
    found = torch.cat([FOUR[:, :2], FOUR[:, :2] + of_each * (FOUR[:, 2:] - FOUR[:, :2])], 1) + moved
    return {"image": image, "boxes": found.expand(10, 4, 4), "labels": torch.zeros(10, 4, dtype=torch.long)}


def test_boxes_of_several_pictures_must_cover_their_pixels():
    rows = [*range(10)]
    assert boxes._compare_pixels(batch(), rows) == ""
    assert boxes._compare_pixels(batch(moved=0.5), rows) == ""
    assert boxes._compare_pixels(batch(), []) == ""
    faint = batch()
    faint["image"][:, :, 18:] = 0.15 + 0.2 * (faint["image"][:, :, 18:] - 0.15)
    assert boxes._compare_pixels(faint, rows) == ""  # mixup
    for wrong in (batch(moved=4), batch(of_each=2), batch(of_each=0.5)):
        assert "10 of 10 samples of several pictures do not match their rectangles" in boxes._compare_pixels(
            wrong, rows
        )


class Drawn:
    def __init__(self, objects: list[int]):
        self.objects = objects

    def get(self, index: int, generator: None) -> dict:
        return {"labels": torch.tensor([0] * self.objects[index] + [-1] * 8)}


def test_samples_with_more_objects_than_their_picture_are_not_read_alone():
    assert boxes.of_one_picture(
        Drawn([2, 7, 1, 3]), [torch.zeros(2), torch.zeros(2), torch.zeros(2), torch.zeros(3)]
    ) == [0, 2, 3]
