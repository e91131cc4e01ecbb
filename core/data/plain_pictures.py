"""Copies between splits that are none: windows without content, and drawings of few tones that agree by chance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trainworthy.core.data import contents as hashed
from trainworthy.core.data import inventory
from trainworthy.core.recipe.stage import Data

# Different values of a drawing in flat colours, its channels together; a photo or a scan has more in any corner
TONES = 16
LOOKED_AT = 64  # samples that are looked at for it
MOST = 0.5  # share of the validation samples that may agree by chance: data that were duplicated before the split have more
MOST_BLANK = 0.9  # share of the validation samples that may be blank


@dataclass
class Alike:
    """What of the copies in both splits is none."""

    blank: int = 0
    """Exact copies whose inputs have one value everywhere."""
    natural: bool = False
    """Whether drawings of few tones agree with training as often as training drawings do with each other."""
    remark: str = ""


def alike(scans: Mapping[str, inventory.Scan], data: Data, found: Mapping[str, Any]) -> Alike:
    """Look at the copies of `found` (inventory.overlap) in `data`, if the inputs are pictures. A copy of a file is always one."""
    exact, near = found["exact"], found.get("near_only", 0)
    val, train = scans["val"], scans["train"]
    if not exact + near or val.contents is None or not any(len(shape) > 1 for shape in val.shapes):
        return Alike()
    if not (val.seen and val.every and train.seen and train.every):
        return Alike()
    files = {i for i, _ in hashed.shared(val.every, train.every)} if val.every.raw and train.every.raw else set()
    pairs = [i for i, _ in hashed.shared(val.seen, train.seen) if i not in files]
    blank, most = _blank(val.seen, data, pairs), MOST * len(val.indices)
    remark = f"; {blank} of the exact ones have one value everywhere (empty windows): no copies" * bool(blank)
    if len(pairs) < exact or not _is_flat(data, val.indices):
        return Alike(blank, False, remark)
    again = inventory.repeats(train)
    expected = hashed.expected_copies(val.seen, train.seen)
    expected_near = max(expected, (again["near"] or 0) / max(1, again.get("compared", 0)) * len(val.kept))
    limits = [min(most, n + 3 * math.sqrt(n)) for n in (expected, expected_near)]
    natural = exact <= limits[0] and exact + near <= limits[1]
    remark += (f"; the pictures have at most {TONES} tones, and training ones are as alike: {expected:.1f} exact and {expected_near:.1f} near "
               "copies are expected by chance")  # fmt: skip
    return Alike(blank, natural, remark)


def _blank(seen: hashed.Contents, data: Data, copies: Sequence[int]) -> int:
    """Return how many `copies` have one value everywhere in their inputs. 0 if nearly all samples do: then nothing was read."""
    of = dict(zip(map(int, seen.indices), map(int, seen.hashes), strict=True))
    equal: dict[int, list[int]] = {}
    for i in copies:
        equal.setdefault(of[i], []).append(i)
    commonest = sorted(equal.values(), key=len, reverse=True)[:LOOKED_AT]  # blank ones are among them
    blank = sum(len(same) for same in commonest if _tones(data, same[0]) == 1)
    return blank if blank <= MOST_BLANK * len(seen.indices) else 0


def _tones(data: Data, index: int) -> int:
    """Return the number of different values in the inputs of a sample."""
    sample = data.get(index, None)
    return max(len(torch.as_tensor(sample[k]).unique()) for k in hashed.compared_fields(data))


def _is_flat(data: Data, indices: Sequence[int]) -> bool:
    """Return whether nine of ten samples are drawings of few tones."""
    some = indices[:: -(-len(indices) // LOOKED_AT)]
    return sum(_tones(data, i) <= TONES for i in some) >= 0.9 * len(some)
