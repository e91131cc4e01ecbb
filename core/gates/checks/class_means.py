"""Metrics that are means over classes (macro F1, mean IoU): a class without a sample counts 0, so a few samples have a lower best score."""

import torch
from torch import Tensor
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Data, Stage, View

EXACT = 1e-3  # of the ceiling


def share(run: Run, stage: Stage, found: dict) -> str:
    """Return words for the verdict if memorised samples, which have P of K classes, score exactly that share of the ceiling. Both halves
    of them must score their own shares, too: a metric that counts samples does not. Empty if not, or if the halves cannot tell.

    `found`: what the overfit gate keeps of its training."""
    metric, view = stage.gate_evaluator.metric, found["view"]
    if not metric.higher_is_better or metric.floor < 0 or found["metric"] is None:
        return ""
    every, half = list(range(len(view))), len(view) // 2
    shares = []
    for some in (every, every[:half], every[half:]):
        part = View(view.data, [found["indices"][i] for i in some], draws=view.draws)
        got = present(part)
        if got is None or not 0 < got[0] < got[1]:
            return ""
        score = found["metric"] if some is every else run.measure(stage, part, probe=True)[metric.name]
        if abs(score - metric.ceiling * got[0] / got[1]) > EXACT * metric.ceiling:
            return ""
        shares.append(got)
    (mine, classes), *rest = shares
    differ = any(one[0] != mine for one in rest)
    return f": a mean over classes, of which these samples have {mine} of {classes}" if differ else ""


def present(data: Data) -> tuple[int, int] | None:
    """Return (classes of which there is a sample, classes) of the first target that has class numbers, or a 0 or 1 for each class."""
    for key, entry in data.fields.items():
        if entry.role != "target":
            continue
        values = [data.get(i, None)[key] for i in range(len(data))]
        if any(isinstance(v, str) for v in values) or len({torch.as_tensor(v).shape for v in values}) > 1:
            return None
        rows: Tensor = torch.stack([torch.as_tensor(v) for v in values])
        if entry.classes is not None:
            known = rows[(rows >= 0) & (rows < len(entry.classes))]
            return len(known.unique()), len(entry.classes)
        if rows.dim() == 2 and rows.shape[1] > 1 and bool(((rows == 0) | (rows == 1)).all()):
            return int(rows.any(0).sum()), rows.shape[1]
    return None
