"""Checks that loss and evaluation hand a sample to the model in the same way: same scale, channels in the same order."""

import contextlib
from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.modes import hooked, in_mode
from trainworthy.core.gates.checks.batch_norm import layers
from trainworthy.core.gates.checks.paths import CHANNELS
from trainworthy.core.gates.gate import fetch
from trainworthy.core.loop.run import Run
from trainworthy.core.recipe.stage import Stage, View

EQUAL = 1e-3  # mean difference of two equal inputs, in standard deviations
ALIKE = 0.9  # correlation of a sample's entries above which two inputs are the same sample
SCALE, SHIFT = 1.25, 0.25  # factor between two inputs of one sample; distance of their means in standard deviations


def compare_inputs(run: Run, stage: Stage, indices: list[int]) -> tuple[str, str] | None:
    """Return (what is wrong, cause) if the loss and the evaluation hand the same training samples to the model in different scales or
    channel orders. The inputs of every module are compared, up to the first one that owns parameters. Inputs with different content
    (noise of diffusion, another crop) are not compared."""
    data = stage.data.get("train")
    if data is None or run.world > 1 or not _measured(data, indices):
        return None
    view = View(data, indices)
    with (
        _received(stage.model) as learnt,
        torch.no_grad(),
        run.autocast(),
        in_mode(stage.model, training=not layers(stage.model)),
    ):
        stage.loss(stage.model, fetch(view, list(range(len(view))), None, run.device))
    with _received(stage.eval_model) as scored:
        run.measure(stage, view, probe=True)
    for name in [*learnt]:
        mine, theirs = (_rows(found.pop(name, []), len(view)) for found in (learnt, scored))
        if mine is None or theirs is None or mine.shape != theirs.shape:
            continue
        if fault := _differ(mine, theirs):
            where = name or type(stage.model).__name__
            return f"of the same samples `{where}` gets {fault[0]}", fault[1]
    return None


def _measured(data: Any, indices: list[int]) -> bool:
    """Return whether a sample has an input of measured numbers, such as pixels."""
    sample = data.get(indices[0], None)
    inputs = [sample[k] for k, f in data.fields.items() if f.role == "input" and isinstance(sample.get(k), Tensor)]
    return any(x.is_floating_point() and x.numel() > 1 for x in inputs)


@contextlib.contextmanager
def _received(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """{module: its first floating-point inputs, in order of the calls}, up to the first module with parameters of its own."""
    found: dict[str, list[Tensor]] = {}
    first: list[str] = []

    def keep(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if given is None or given.ndim < 2 or given.is_meta or (first and name not in found):
            return
        found.setdefault(name, []).append(given.detach().to("cpu", copy=True))
        if not first and next(module.parameters(recurse=False), None) is not None:
            first.append(name)

    named = model.named_modules()
    with hooked(m.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, m in named):
        yield found


def _rows(calls: list[Tensor], n: int) -> Tensor | None:
    """The inputs of the first `n` samples, (n, ...); None if calls differ in shape or are too few."""
    if not calls or len({c.shape[1:] for c in calls}) > 1:
        return None
    rows = torch.cat(calls)[:n]
    return rows if len(rows) == n else None


def _order(mine: Tensor, theirs: Tensor) -> tuple[int, ...] | None:
    """Return the order of the channels (N, C, ...) in which two inputs are equal, if they are not as they are."""
    if mine.ndim < 3 or not 2 <= mine.shape[1] <= CHANNELS:
        return None

    def far(order: tuple[int, ...]) -> float:
        return ((mine[:, order] - theirs).abs().mean() / theirs.std().clamp_min(1e-12)).item()

    as_they_are, *others = permutations(range(mine.shape[1]))
    return next((o for o in others if far(o) < EQUAL), None) if far(as_they_are) > 10 * EQUAL else None


def _differ(mine: Tensor, theirs: Tensor) -> tuple[str, str] | None:
    """(what differs, cause) of the same samples in the loss and in the evaluation."""
    if order := _order(mine, theirs):
        detail = " ".join(map(str, order))
        return (f"channels in the loss and in the evaluation that match in the order {detail}",
                f"loss and evaluation order the channels differently ({detail}): RGB read as BGR, or the reverse")  # fmt: skip
    each = []
    for row, other in zip(mine, theirs, strict=True):  # one by one: doubles of all are twice the batch
        a, b = (to_double(x).flatten() for x in (row, other))
        means, deviations = [x.mean() for x in (a, b)], [x.std().clamp_min(1e-12) for x in (a, b)]
        same = ((a - means[0]) * (b - means[1])).mean() / (deviations[0] * deviations[1])
        each.append(torch.stack([*means, *deviations, same]))
    ma, mb, sa, sb, alike = torch.stack(each, 1)
    if alike.median() < ALIKE:
        return None
    scale, shift = (sa / sb).median().item(), ((ma - mb).abs() / sb).median().item()
    if 1 / SCALE <= scale <= SCALE and shift <= SHIFT:
        return None
    detail = f"mean {ma.median():.3g} and deviation {sa.median():.3g} in the loss, {mb.median():.3g} and {sb.median():.3g} in the evaluation"
    return (
        detail,
        "loss and evaluation scale the input differently: normalise in one place, inside the model or in the data set",
    )
