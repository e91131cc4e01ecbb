"""Pictures of two splits that show one part of a larger picture."""

import torch
from torch import Tensor
from trainworthy.core.data import parts
from trainworthy.core.recipe.stage import Data, Field


class Pictures(Data):
    def __init__(self, pictures: list[Tensor]):
        self.pictures = pictures
        self.fields = {"image": Field("input")}

    def __len__(self) -> int:
        return len(self.pictures)

    def get(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {"image": self.pictures[index]}


DRAWS = torch.Generator().manual_seed(0)
WHOLE = torch.rand(3, 400, 400, generator=DRAWS)


def tiles(distance: int) -> tuple[Pictures, Pictures]:
    """Tiles of 96 pixels, (training, every fifth)."""
    places = [(y, x) for y in range(0, 305, distance) for x in range(0, 305, distance)]
    cut = [WHOLE[:, y : y + 96, x : x + 96] for y, x in places]
    return Pictures([c for i, c in enumerate(cut) if i % 5 != 4]), Pictures(cut[4::5])


def test_tiles_that_overlap_share_parts_and_others_do_not():
    train, val = tiles(48)
    found = parts.shared(train, val)
    assert found is not None
    assert len(found.pairs) == found.of == len(val)
    assert all(abs(rows) in (0, 48) and abs(columns) in (0, 48) for _, _, rows, columns in found.pairs)
    assert "moved by" in str(found)
    assert parts.shared(*tiles(96)) is None


def test_bytes_of_pixels_are_compared_too():
    train, val = tiles(48)
    both = [Pictures([(255 * x).byte() for x in one.pictures]) for one in (train, val)]
    assert parts.shared(*both) is not None


def test_figures_on_one_background_gradients_and_stripes_are_no_parts():
    figure = torch.rand(1, 24, 24, generator=DRAWS)

    def placed() -> Tensor:
        y, x = torch.randint(0, 40, (2,), generator=DRAWS).tolist()
        picture = torch.zeros(1, 64, 64)
        picture[:, y : y + 24, x : x + 24] = figure
        return picture

    assert parts.shared(Pictures([placed() for _ in range(200)]), Pictures([placed() for _ in range(60)])) is None
    rows = torch.arange(64.0)
    for kind in (
        lambda k: (rows[:, None] + rows + k) / 200,
        lambda k: (rows[:, None] * 0 + rows + k) % 11,
        lambda k: rows * 0 + rows[:, None],
    ):
        drawn = [kind(k)[None] for k in range(40)]
        assert parts.shared(Pictures(drawn[:30]), Pictures(drawn[30:])) is None


def test_other_samples_are_not_read():
    assert (
        parts.shared(Pictures([torch.rand(10) for _ in range(8)]), Pictures([torch.rand(10) for _ in range(4)])) is None
    )
    small = [torch.rand(1, 28, 28) for _ in range(8)]
    assert parts.shared(Pictures(small), Pictures(small)) is None
