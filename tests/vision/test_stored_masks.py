"""Stored masks that are turned against their pictures, or were interpolated, and healthy ones that look alike."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from trainworthy.recipes.vision.gates import answers, stored_masks

SIDE, N = 64, 80


def pairs(seed: int, *, centred: bool = False, border: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Ellipses of four classes on a noisy ground; `centred`: one in the middle; `border`: background, border, inside."""
    draws, found = torch.Generator().manual_seed(seed), []
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    for _ in range(N):
        image = 90 + 8 * torch.randn((3, SIDE, SIDE), generator=draws)
        mask = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
        for _ in range(1 if centred else 3):
            cy, cx, ry, rx = (
                torch.rand(4, generator=draws).mul(torch.tensor([40, 40, 9, 9])).add(torch.tensor([12, 12, 5, 5]))
            )
            if centred:
                cy = cx = torch.tensor(SIDE / 2 - 0.5)
            radius = ((y - cy) / ry).square() + ((x - cx) / rx).square()
            image[:, radius <= 1] += 40 + 60 * torch.rand((), generator=draws)
            if border:
                mask[radius <= 1] = 1
                mask[radius <= (1 - 1 / min(ry, rx)) ** 2] = 2
            else:
                mask[radius <= 1] = int(torch.randint(1, 5, (), generator=draws))
        found.append((image.clamp(0, 255).byte(), mask))
    return found


def resized(mask: Tensor, mode: str) -> Tensor:
    return F.interpolate(mask[None, None].float(), scale_factor=1.5, mode=mode)[0, 0].round().byte()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("turn", answers.TURNS[1:], ids=lambda turn: turn.name)
def test_masks_of_which_a_third_is_turned(turn: answers.Turn, seed: int):
    turned = [(p, turn.apply(m) if i % 3 == 0 else m) for i, (p, m) in enumerate(pairs(seed))]
    assert "and not as they are stored (0 by any other turn)" in stored_masks.turned(turned)


@pytest.mark.parametrize("seed", range(4))
def test_masks_that_fit_or_fit_no_way_are_no_fault(seed: int):
    healthy = pairs(seed)
    assert stored_masks.turned(healthy) == ""
    assert stored_masks.turned(pairs(seed, centred=True)) == "", "symmetrical: turned masks fit as well"
    others = [(p, healthy[(i + 7) % N][1]) for i, (p, _) in enumerate(healthy)]
    assert stored_masks.turned(others) == "", "masks of other pictures fit by no turn"
    flat = [
        (torch.randint(0, 255, p.shape, generator=torch.Generator().manual_seed(seed)).byte(), m) for p, m in healthy
    ]
    assert stored_masks.turned(flat) == "", "pictures that do not show the outlines"
    wide = [(p[:, :48], m[:48]) for p, m in healthy]
    assert stored_masks.turned(wide) == ""
    assert "masks fit their picture mirrored and not as they are stored" in stored_masks.turned(
        [(p, m.flip(-1)) for p, m in wide]
    )


@pytest.mark.parametrize("seed", range(4))
def test_masks_that_were_interpolated(seed: int):
    masks = [m for _, m in pairs(seed)]
    assert "go through one of" in stored_masks.interpolated([resized(m, "bilinear") for m in masks])
    assert stored_masks.interpolated(masks) == ""
    assert stored_masks.interpolated([resized(m, "nearest") for m in masks]) == ""
    bordered = [m for _, m in pairs(seed, border=True)]
    assert stored_masks.interpolated(bordered) == "", "a class of borders is in between on purpose"
    void = [torch.where(F.max_pool2d((m[None] > 0).float(), 3, 1, 1)[0].bool() & (m == 0), 255, m) for m in masks]
    assert stored_masks.interpolated(void) == "", "void around objects is no class"
