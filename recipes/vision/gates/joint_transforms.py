"""The gate `joint-transforms`: image and mask get the same crop, mirroring and resizing."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.verdict import Finding
from trainworthy.core.gates import gate
from trainworthy.core.gates.causes.named import order_causes
from trainworthy.core.gates.gate import GateContext, fetch, pick
from trainworthy.core.loop.run import evaluating
from trainworthy.recipes.vision.data.masks import IGNORE

# Number of augmented windows; smallest correlation of a picture with the mask it was painted from (healthy: 1, unrelated: 0).
DRAWS, AS_ONE = 32, 0.7


def outputs(context: GateContext) -> int:
    """Return the number of classes that the net predicts."""
    run, stage = context.look()
    with evaluating(stage.model), torch.no_grad(), run.autocast():
        return stage.model(fetch(stage.data["train"], [0], None, run.device)["image"]).shape[1]


class Painted(Sequence):
    """Pairs of the same sizes whose pictures show their masks: random blocks of the first class, the last class and void."""

    def __init__(self, pairs: Sequence, n: int, block: int):
        self.pairs, self.n, self.block = pairs, n, block

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        picture, mask = self.pairs[row]
        h, w = mask.shape
        kinds = torch.tensor([0, 0, self.n - 1, self.n - 1, IGNORE], dtype=mask.dtype)
        coarse = torch.randint(
            5, (-(-h // self.block), -(-w // self.block)), generator=torch.Generator().manual_seed(row)
        )
        ids = kinds[coarse].repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)[:h, :w]
        bright = torch.where(ids == 0, 40, torch.where(ids == IGNORE, 128, 215)).to(picture.dtype)
        return bright.expand_as(picture).contiguous(), ids.contiguous()


@gate(
    "joint-transforms",
    rows="V2 V5",
    title="image and mask get the same crop, mirroring and resizing",
    reads="data model",
    explains=True,
)
def joint_transforms(context: GateContext) -> Finding:
    """Sends pictures that show their own masks through both paths. Picture and mask must still agree in each window, and no other id may
    appear."""
    (run, stage), n, seed = context.look(), outputs(context), context.cfg.run.seed
    wrong, batch, measured = [], None, []
    for name, data in stage.data.items():
        twin = copy.copy(data)
        twin.pairs = Painted(data.pairs, n, max(4, stage.data["train"].get(0, None)["mask"].shape[0] // 8))
        for path, draws in (("training", seed), ("evaluation", None)):
            indices = pick(data, min(DRAWS, len(data)), seed)
            now = fetch(twin, indices, draws, run.device)
            image, mask = to_double(now["image"]).mean(1), now["mask"].cpu()
            close = [_agree(x, m, n) for x, m in zip(image, mask, strict=True)]
            close = [c for c in close if c is not None]
            mismatched = sum(c < AS_ONE for c in close)
            made_up = [v for v in mask.unique().tolist() if v not in (0, n - 1, IGNORE)]
            if mismatched > 0.1 * len(close):
                wrong.append(
                    f"{name}, {path} path: in {mismatched} of {len(close)} windows the mask does not match its picture"
                )
            if made_up:
                wrong.append(
                    f"{name}, {path} path: new ids appear ({', '.join(map(str, made_up[:5]))}): masks are interpolated"
                )
            batch, measured = now, [*measured, f"{min(close, default=1.0):.2f}"]
    return Finding(
        not wrong, "; ".join(wrong) or f"pictures painted from their masks match them (lowest correlation {' '.join(measured)})",
        f"a correlation of {AS_ONE} in 90% of the windows of both paths, and no new ids",
        order_causes(
            (any("does not match" in w for w in wrong), "picture and mask get different random draws: pass both to one transform "
             "(tv_tensors), or draw once for both"),
            (any("evaluation path" in w and "does not match" in w for w in wrong), "the picture is resized, rotated or padded and its mask is not"),
            (any("interpolated" in w for w in wrong), "masks are resized by interpolation: use nearest neighbour")),
        batch=batch if wrong else None,
    )  # fmt: skip


def _agree(image: Tensor, mask: Tensor, n: int) -> float | None:
    """Return |correlation| of a picture (H, W) with its mask over the two classes; None if a window has only one."""
    inside = (mask == 0) | (mask == n - 1)
    x, y = image[inside], to_double(mask[inside] > 0)
    if len(y) < 100 or not 0.1 < y.mean() < 0.9:
        return None
    x, y = x - x.mean(), y - y.mean()
    return ((x @ y) / (x.norm() * y.norm()).clamp_min(1e-12)).abs().item()
