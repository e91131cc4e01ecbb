"""Compares samples by content: how similar two are in all of their inputs together."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

SHORT = 32  # entries below which the angle between two rows has no meaning
SIDE = 32  # images are pooled to at most SIDE x SIDE before comparison
SMALLEST = 8  # rows and columns from which an input is compared as an image
NEAR = 0.985  # cosine of centred contents; highest between different MNIST digits: 0.980, lowest with 5% noise: 0.981
NEAR_SHORT = 0.993  # for up to 256 entries, or pixels: different digits of 16x16 pixels reach 0.992
NEAR_TINY = 0.9965  # for up to 100 pixels: of 1,797 digits of 8x8 pixels (UCI), 6 have another one above 0.993, none above 0.996
ENLARGED = ((8, 0.07), (16, 0.025))
"""(pixels of a side, share of the power that this many pixels do not hold): below it, most pictures were enlarged from such small ones.
Digits of 8x8 pixels that were enlarged: 0.04 to 0.065 at 8, 0.009 at 16; of 16x16: 0.022 at 16; photos and digits of 28x28: 0.047 and more."""
COARSE = 0.1
"""Share of the power that half as many pixels of a side do not hold, at least; smooth pictures (windows of sky) have less."""
DETAILS = 0.3
"""Smallest correlation of what two images have beyond their smooth parts, if one is a copy of the other. Of crops of photos that were saved
again as JPEG (quality 30), made brighter, noisy (4%) or moved by a pixel, 90% have 0.88 and more; the rest hardly has any detail. Different
windows of sky have at most 0.1."""
ROW_DETAILS = 0.6
"""The same for a row of L entries, and at least 4.5/sqrt(L): unrelated noise reaches 3/sqrt(L) where one window of hundreds is the nearest.
Details that are in few entries (a step, as an edge in a line of a photograph) count as so many entries: two steps agree by chance."""
EQUAL_DETAILS, FEW_DETAILS = 0.98, 10
"""Details of a copy agree at least so; details in fewer entries (a step, a peak) say nothing."""
SMOOTH = 5  # entries of the local mean of a row
PLAIN = 0.05  # share of a row's norm that its details have at least; windows of a series without noise have less


def pooled(value: Tensor) -> Tensor:
    """Return an input as it is compared: the last two axes averaged to at most `SIDE` entries."""
    v = value.float()
    if v.ndim >= 2 and min(v.shape[-2:]) > SIDE:
        v = F.adaptive_avg_pool2d(v.reshape(1, -1, *v.shape[-2:]), SIDE)[0]
    return v


def rows(samples: list[list[Tensor]]) -> tuple[Tensor, list[int], list[tuple[int, ...]]] | None:
    """Return (rows (N, D), widths of the parts of a row, shapes of the long parts), or None if samples differ in size.

    Args:
        samples: each sample's inputs. Each long one is a part of its own, flat, centred and of unit norm, so that none outweighs the
            others by its size or scale. Of a table of a series (steps, columns) each column is an input: a calendar next to it must
            not make two windows alike. The short ones together are the last part: as they are next to a long one, otherwise like one.
    """
    samples = [[part for x in one for part in _columns(x)] for one in samples]
    shapes = [tuple(x.shape) for x in samples[0]]
    sizes = [x.numel() for x in samples[0]]
    if any([x.numel() for x in one] != sizes for one in samples):
        return None
    samples = [[x.flatten() for x in one] for one in samples]
    long = [k for k, n in enumerate(sizes) if n >= SHORT]
    short = [k for k in range(len(sizes)) if k not in long]
    parts = [_unit(torch.stack([one[k] for one in samples])) for k in long]
    if short:
        rest = torch.stack([torch.cat([one[k] for k in short]) for one in samples])
        parts.append(rest if long and rest.shape[1] < SHORT else _unit(rest))
    return torch.cat(parts, 1), [part.shape[1] for part in parts], [shapes[k] for k in long]


def _columns(value: Tensor) -> list[Tensor]:
    """Return the columns of a table of many steps and few columns (one, too: a series of shape (L, 1) or (1, L)), else the input itself."""
    if value.ndim != 2 or not 0 < min(value.shape) < SMALLEST or max(value.shape) < SHORT:
        return [value]
    return list(value.unbind(value.shape.index(min(value.shape))))


def _unit(values: Tensor) -> Tensor:
    centred = values - values.mean(1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True).clamp_min(1e-9)


def similarity(a: Tensor, b: Tensor, widths: list[int]) -> Tensor:
    """Return (rows of `a`, rows of `b`) the cosine of two samples, or that of their least similar part if they have several.

    The short part has 1 - d²/2 instead, where d² is the mean squared distance in standard deviations of `b`: 1 for equal rows, 0 on
    average for two different ones."""
    if len(widths) == 1:
        return a @ b.T
    least, most = torch.ones(len(a), len(b)), torch.full((len(a), len(b)), -1.0)
    for x, y in zip(a.split(widths, 1), b.split(widths, 1), strict=True):
        if x.shape[1] < SHORT:
            scale = y.std(0, correction=0)
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            least = torch.minimum(least, 1 - torch.cdist(x / scale, y / scale).square() / (2 * x.shape[1]))
            continue
        dot = x @ y.T
        # A constant part has no direction: two constant ones are alike
        least = torch.minimum(least, 1 - (x.square().sum(1)[:, None] + y.square().sum(1)[None]) / 2 + dot)
        most = torch.maximum(most, dot)
    return torch.minimum(least, most)


def nearest(closeness: Tensor, count: int = 0, *, own: bool = False) -> Tensor:
    """Return the place of the largest entry in each row of a table (N, M), (N,); with `count` the places of that many, (N, count).
    `own`: row and column i are one sample, which is not its own neighbour; the diagonal is overwritten."""
    table = closeness.fill_diagonal_(float("-inf")) if own else closeness
    return table.topk(count, 1).indices if count else table.argmax(1)


def limit(widths: list[int], shapes: list[tuple[int, ...]], contents: Tensor | None = None) -> float:
    """Return the similarity above which two samples are near copies. Channels are not counted: a grey picture has three equal ones.
    Pictures among `contents` (N, D) that were enlarged count as small as they were."""
    sizes = [math.prod(shape[-2:] if len(shape) > 2 else shape) for shape in shapes]
    if contents is not None:
        parts = contents[:: max(1, len(contents) // 200)].split(widths, 1)
        sizes = [min(n, _stored(x, shape)) for n, x, shape in zip(sizes, parts, shapes, strict=False)]
    if any(n <= 100 for n, shape in zip(sizes, shapes, strict=True) if len(shape) > 1):
        return NEAR_TINY
    sizes += [w for w in widths[len(shapes) :] if w >= SHORT]
    return NEAR if min(sizes) > 256 else NEAR_SHORT


def _stored(rows: Tensor, shape: tuple[int, ...]) -> int:
    """Return the pixels from which most images (N, D) of this shape can be made again by interpolation."""
    if len(shape) < 2 or not len(rows):
        return math.prod(shape)
    images = rows.reshape(len(rows), -1, *shape[-2:])

    def lost(side: int) -> float:
        """Return the median share of the power that is lost at this size."""
        again = F.interpolate(F.adaptive_avg_pool2d(images, side), size=shape[-2:], mode="bilinear")
        power = images.square().flatten(1).sum(1).clamp_min(1e-12)
        return ((images - again).square().flatten(1).sum(1) / power).median().item()

    for side, rest in ENLARGED:
        if side < min(shape[-2:]) and lost(side) <= rest and lost(side // 2) >= COARSE:
            return side * side
    return math.prod(shape[-2:])


def share_details(a: Tensor, b: Tensor, widths: list[int], shapes: list[tuple[int, ...]]) -> Tensor:
    """Return for each pair of rows (N, D) whether their images and series also agree in what is not smooth.

    Two windows of sky, or of a wall, have a cosine near 1 because both get brighter from one side to the other; two windows of a series
    because it repeats. They are no copies. Images without any detail agree; a series without any (a calendar) leaves it to the other inputs.
    """
    agree, smooth = torch.ones(len(a), dtype=torch.bool), torch.full((len(a),), bool(shapes))
    for x, y, shape in zip(a.split(widths, 1), b.split(widths, 1), shapes, strict=False):
        if len(shape) == 1:
            plain, same = _compare_rows(x, y)
            agree, smooth = agree & (plain | same), smooth & plain
        else:
            smooth.zero_()
        if len(shape) < 2 or min(shape[-2:]) < SMALLEST:
            continue
        x, y = (_details(part.reshape(len(part), math.prod(shape[:-2]), *shape[-2:])) for part in (x, y))
        blank = (x.norm(dim=1) < 1e-6) & (y.norm(dim=1) < 1e-6)
        agree &= (F.cosine_similarity(x, y) >= DETAILS) | blank
    return agree & ~smooth


def _compare_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each pair of rows (N, L) whether one of them is smooth, and whether they agree in what is not."""
    border = SMOOTH // 2
    x, y = (v[:, border:-border] - F.avg_pool1d(v[:, None], SMOOTH, 1)[:, 0] for v in (a, b))
    plain = torch.minimum(x.norm(dim=1), y.norm(dim=1)) < PLAIN  # rows have unit norm
    # a third of the entries for noise, 3 for a step
    spread = [v.square().sum(1).square() / v.pow(4).sum(1).clamp_min(1e-30) for v in (x, y)]
    entries = (3 * torch.minimum(*spread)).clamp(1, a.shape[1])
    needed = (4.5 / entries.sqrt()).clamp(ROW_DETAILS, EQUAL_DETAILS)
    return plain, (F.cosine_similarity(x, y) >= needed) & (entries >= FEW_DETAILS)


def _details(images: Tensor) -> Tensor:
    """Return (N, D): images (N, C, H, W) less their local mean, without the border, centred."""
    size = max(3, min(images.shape[-2:]) // 4 | 1)
    border = size // 2
    found = images[..., border:-border, border:-border] - F.avg_pool2d(images, size, 1)
    return (found - found.mean((1, 2, 3), keepdim=True)).flatten(1)
