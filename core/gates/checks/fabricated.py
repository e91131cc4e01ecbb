"""Checks that values which were not measured, or an input's length, do not predict the target."""

import math

import torch
from torch import Tensor
from trainworthy.core.base.verdict import Finding, Skip
from trainworthy.core.data.field_statistics import class_field
from trainworthy.core.data.inventory import Scan
from trainworthy.core.gates import gate
from trainworthy.core.gates.gate import GateContext, train_set

BINS, FEWEST = 32, 30


@gate("fabricated", rows="C8", title="padding, interpolation and length do not predict the target", reads="data")
def fabricated(context: GateContext) -> Finding:
    """Fit naive Bayes on input lengths and declared fabricated fractions, without the content, on train, and score it
    on val. A declared fraction has no reason to depend on the target, so the gate also measures how much of its
    variance the class explains."""
    train_set(context.look()[1])
    train, val = context.scans["train"], context.scans["val"]
    declared = "; ".join(
        f"{k} {_mean(train, k)} of train and {_mean(val, k)} of val fabricated" for k in train.fabricated
    )
    key = class_field(train.fields, val.fields)
    lengths, shares = _lengths(train, val), {k: (s, val.fabricated[k]) for k, s in train.fabricated.items()}
    if not lengths and not shares:
        raise Skip("every sample has the same length, and none is padded, resampled or synthetic")
    if key is None or len(val.indices) < FEWEST:
        too_few = f"{len(val.indices)} held-out samples are too few to decide"
        why = too_few if key else "no target is a class"
        raise Skip(f"{declared}; {why}" if declared else why)
    if train.fields[key]["invalid"] or val.fields[key]["invalid"]:
        raise Skip(f"'{key}' has values that are not class ids: see data")
    place = {c: i for i, c in enumerate(sorted({*train.targets[key], *val.targets[key]}))}
    y, truth = (torch.tensor([place[c] for c in scan.targets[key]]) for scan in (train, val))
    n, majority = len(truth), (truth == truth.mode().values).float().mean().item()
    accuracy = {
        name: _naive_bayes(list(found.values()), y, truth)
        for name, found in {"lengths": lengths, "fabricated share": shares, "both": lengths | shares}.items()
        if found and (name != "both" or (lengths and shares))
    }
    explained = {k: _explained(*found, y, truth) for k, found in shares.items()}
    solved = majority + 0.5 * (1 - majority)
    wrong = [
        f"{name} alone give{'s' * (name == 'fabricated share')} {a:.0%} of val right, its largest class is {majority:.0%}"
        for name, a in accuracy.items()
        if _at_least(a, n) > solved
    ]
    wrong += [
        f"the class explains {r:.0%} of the fabricated share of '{k}'{_by_class(train, k)}"
        for k, r in explained.items()
        if r - 6 * math.sqrt(max(r, 0.0)) * (1 - r) / math.sqrt(n) > 0.5  # 3 standard deviations of r squared
    ]
    guessed = ", ".join(f"{name} {a:.3f}" for name, a in accuracy.items())
    return Finding(
        not wrong, "; ".join([*wrong, *([declared] if declared else [])]) if wrong
        else f"{declared + '; ' if declared else ''}accuracy from {guessed} (largest class {majority:.3f})",
        f"accuracy from lengths and fabricated shares not significantly above {solved:.2f} (midpoint of the largest class and 1); the "
        "class explains less than half of each fabricated share",
        "classes come from different sources (devices, archives, rates) and were resampled or padded to one size\n"
        "only the rare class was enlarged with synthetic or interpolated samples\n"
        "padding is read as content: mask it, or pad and crop every class in the same way",
        evidence={"accuracy": accuracy, "majority": majority, "explained": explained,
                  "fabricated": {n: {k: s.fields[k]["fabricated"] for k in s.fabricated} for n, s in context.scans.items()}},
    )  # fmt: skip


def _mean(scan: Scan, key: str) -> str:
    return f"{scan.fields[key]['fabricated']['mean']:.1%}"


def _by_class(scan: Scan, key: str) -> str:
    """Return the smallest and largest mean fraction of a class, if classes have names."""
    means = sorted((share, name) for name, share in scan.fields[key]["fabricated"].get("classes", {}).items())
    return f" ({means[0][1]}: {means[0][0]:.0%}, {means[-1][1]}: {means[-1][0]:.0%})" if means else ""


def _lengths(train: Scan, val: Scan) -> dict[str, tuple[list[int], list[int]]]:
    """Return the lengths that differ between samples: characters of a text, entries along an axis (or all entries, if
    inputs differ in their number of axes)."""
    found = {}
    for key, rows in train.sizes.items():
        both = rows, val.sizes[key]
        if len({len(row) for part in both for row in part}) == 1:
            columns = [tuple([row[axis] for row in part] for part in both) for axis in range(len(rows[0]))]
        else:
            columns = [tuple([math.prod(row) for row in part] for part in both)]
        found |= {f"{key} {i}": column for i, column in enumerate(columns) if len(set(column[0])) > 1}
    return found


def _naive_bayes(features: list[tuple[list, list]], y: Tensor, truth: Tensor) -> float:
    """Accuracy on the second half; each feature's class counts per bin are fitted on the first half."""
    classes = int(max(y.max(), truth.max())) + 1
    score = torch.bincount(y, minlength=classes).clamp_min(1).log().repeat(len(truth), 1)
    for fitted, scored in features:
        x, xv = (torch.tensor(v, dtype=torch.float64) for v in (fitted, scored))
        values = x.unique()
        edges = (values[1:] + values[:-1]) / 2  # with few values, each gets its own bin
        if len(values) > BINS:
            edges = x.quantile(torch.linspace(0, 1, BINS + 1, dtype=x.dtype)[1:-1])
        cells = torch.bucketize(x, edges) * classes + y
        table = torch.bincount(cells, minlength=(len(edges) + 1) * classes).view(-1, classes) + 0.5
        score = score + (table / table.sum(0)).log()[torch.bucketize(xv, edges)]
    return (score.argmax(1) == truth).float().mean().item()


def _explained(fitted: list[float], scored: list[float], y: Tensor, truth: Tensor) -> float:
    """Return the fraction of the variance of `scored` that the class means of `fitted` explain (0 or less: none)."""
    x, xv = (torch.tensor(v, dtype=torch.float64) for v in (fitted, scored))
    means = torch.stack(
        [x[y == c].mean() if (y == c).any() else x.mean() for c in range(int(max(y.max(), truth.max())) + 1)]
    )
    spread = (xv - xv.mean()).square().sum().item()
    return 1 - (xv - means[truth]).square().sum().item() / spread if spread else 0.0


def _at_least(share: float, n: int, z: float = 3.0) -> float:
    """Lower end of Wilson's interval at `z` standard deviations."""
    middle = share + z * z / (2 * n)
    return (middle - z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))) / (1 + z * z / n)
