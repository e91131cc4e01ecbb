"""Checks pairs of predictions and float targets: a target that is the input or a column of it, and noise to predict that does not fit the input."""

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor
from trainworthy.core.base.correlation import pearson, spearman
from trainworthy.core.base.doubles import to_double
from trainworthy.guard.hooks.addresses import address_of
from trainworthy.guard.measures.models.sampling import coefficients

PAIRS = 24
WINDOW = 512  # longest target that is read, in steps
MOST = 16_384  # numbers of one input in which a target is searched for
HELD = 0.3  # correlation of a target with the noise in it
COLUMNS, FEW = 256, 4  # most further columns in a flat input with a noisy sample; most columns read one by one


class Regression:
    """The first pairs of a run, as plain numbers."""

    def __init__(self) -> None:
        self.pairs = self.copies = self.leaks = 0
        self.column = 0
        self.copied: tuple | None = None  # the model's call whose target was its own input
        self.with_target: tuple | None = None  # a model's call, its target, and the inputs that hold it
        self.chosen: tuple | None = None  # a model's call, and the input that has its target among its steps
        self.levels: list[tuple[Tensor, Tensor]] = []  # shares of signal and noise in the inputs, by sample
        self.conditions: dict[int, list[Tensor]] = {}  # further inputs with one number per sample (time)
        self.noisy = 0
        self.strange: list[tuple[float, int]] = []
        """Correlation of drawn noise with an input that does not hold it, entries."""
        self.held: list[tuple[float, int]] = []  # correlation of an input with noise that its target holds, entries
        self.draws: deque = deque(maxlen=8)  # the last noise that was drawn
        self.hidden = Hidden()

    def add(self, prediction: Tensor, target: Tensor, root: tuple | None, batches: Any, inner: Any = ()) -> None:
        """Record one pair of a loss with gradients. `inner`: arguments of the modules within a model that computes its own loss."""
        if prediction.requires_grad == target.requires_grad or root is None or self.pairs >= PAIRS:
            return
        if target.requires_grad:
            prediction, target = target, prediction
        if prediction.shape != target.shape or not target.is_floating_point() or not target.dim():
            return
        given = [x for x in (*root[1], *root[2].values()) if isinstance(x, Tensor)]
        target = target.detach()
        self.pairs += 1
        same = next((x for x in given if x.shape == target.shape and x.is_floating_point()), None)
        if same is not None and target.dim() >= 2 and target.shape[1] >= 8 and torch.equal(same, target):
            self.copies += 1
            self.copied = (*root, same)
        self._leak(given, target)
        if self.with_target is None:
            self.with_target = with_target(given, target, root)
        if self.chosen is None and (series := among_steps(given, target)) is not None:
            self.chosen = (*root, series)
        same, given = (same, given) if same is not None else joined(given, target, batches)
        if same is not None and len(target) >= 4 and target[0].numel() >= 2:
            if any(
                torch.equal(same, x) for leaves in batches for x in leaves if x.shape == same.shape
            ):  # it is noised inside
                calls = ([x for x in args if isinstance(x, Tensor)] for args in inner)
                given, same = next(
                    ((c, c[0]) for c in calls if c and c[0].shape == same.shape and not torch.equal(c[0], same)),
                    (given, None),  # calls within the model are seen in its first calls alone
                )
            if same is not None:
                self._noise(same.detach(), target, given, batches)

    def drew(self, out: Tensor) -> None:
        """Note noise."""
        if isinstance(out, Tensor) and out.numel() >= 512 and self.pairs < PAIRS:
            self.draws.append(weakref.ref(out))

    def _drawn(self, target: Tensor) -> bool:
        """Return whether a target is noise itself, and not computed from it."""
        found = [x for ref in self.draws if (x := ref()) is not None]
        return any(address_of(x) == address_of(target) and x.shape == target.shape for x in found)

    def _held(self, noisy: Tensor, target: Tensor, given: list[Tensor]) -> None:
        """Record the correlation of an input with the drawn noise that its target holds (a velocity, a sample's difference from it), of a net that
        is given a time. Without one a noisy target may be meant (Noise2Noise)."""
        timed = any(x.numel() == len(target) and len(x.unique()) >= 4 for x in given if x is not noisy)
        for x in (ref() for ref in self.draws):
            if timed and x is not None and x.shape == target.shape == noisy.shape and abs(pearson(target, x)) > HELD:
                self.held.append((pearson(noisy, x), x.numel()))
                return

    def _leak(self, given: list[Tensor], target: Tensor) -> None:
        """Note a target that is one of its own inputs."""
        if target.dim() in (2, 3) and 1 < target.shape[1] <= WINDOW and len(target) >= 16:
            window = target if target.dim() == 2 else target[:, :, 0]
            for x in given if len(window[:, 0].unique()) >= 8 else ():
                if (column := begins_with_last(window, x.detach())) is not None:
                    self.leaks, self.column = self.leaks + 1, x[0].numel() - x[0, -1].numel() + column
                    return
        for x in given if target.dim() == 2 else ():
            if ends_with(x.detach(), target):
                self.leaks, self.column = self.leaks + 1, x[0].numel() - target.shape[1]
                return
        flat = target.flatten()
        x = next((x for x in given if x.is_floating_point() and x.dim() > 1 and len(x) == len(flat)), None)
        if x is None or len(flat) < 16 or len(flat) != len(target) or not 2 <= x[0].numel() <= 4096:
            return
        if len(flat.unique()) < 8:
            return
        equal = (x.detach().flatten(1) == flat[:, None]).all(0)
        if bool(equal.any()):
            self.leaks += 1
            self.column = int(equal.float().argmax())

    def _noise(self, noisy: Tensor, target: Tensor, given: list[Tensor], batches: Any) -> None:
        """Record how much of the target (drawn noise) and how much of the batch's sample each input holds."""
        self._held(noisy, target, given)
        drawn = target.float()
        if drawn.numel() < 512 or abs(float(drawn.mean())) > 0.15 or abs(float(drawn.std()) - 1) > 0.15:
            return
        strange = None
        for leaves in reversed(batches):  # a loop may have fetched the next batch already
            clean = next((x for x in leaves if x.is_floating_point() and len(x) == len(target)
                          and x.numel() == target.numel()), None)  # fmt: skip
            few = clean is None or target[0].numel() < 8  # entries that are too few for the shares of one sample
            shares = None if few else coefficients(noisy, clean.reshape(target.shape), drawn)
            if shares is not None:
                self.noisy += 1
                self.levels.append(shares)
                for i, x in enumerate(given):
                    if x.numel() == len(target) and x.dim() in (1, 2):
                        self.conditions.setdefault(i, []).append(to_double(x.detach().flatten()))
                return
            if strange is None and clean is not None and white(drawn):
                strange = (pearson(noisy, drawn), drawn.numel())
        if strange is not None:
            self.strange.append(strange)
        elif target[0].numel() >= 128 and self._drawn(target):
            self.hidden.add(noisy, drawn, given)


def begins_with_last(window: Tensor, x: Tensor) -> int | None:
    """Return the column of the input's last step that is the first step of each window to predict, if not all of the window is in the input
    (a series that is reconstructed, in its order or reversed)."""
    if x.dim() not in (2, 3) or len(x) != len(window) or not x.is_floating_point():
        return None
    if x.shape[1] < 2 or x[0].numel() > MOST:  # one step: a state from which the window starts
        return None
    last = x[:, -1].reshape(len(x), -1)
    equal = (last == window[:, :1]).all(0)
    if not bool(equal.any()) or bool((x.flatten(1) == window[:, -1:]).all(0).any()):
        return None
    return int(equal.float().argmax())


def ends_with(x: Tensor, target: Tensor) -> bool:
    """Return whether the last step of a series (N, T, F) is what is to be forecast (N, F), each column in a unit of its own."""
    if (
        x.dim() != 3
        or x.shape[1] < 2
        or x.shape[::2] != target.shape
        or len(x) < 16
        or x.shape[2] < 2
        or not x.is_floating_point()
    ):
        return False
    last, due = to_double(x[:, -1]), to_double(target)
    unit = (last * due).sum(0) / (last * last).sum(0)
    varied = min(len(column.unique()) for column in due.T) >= 8
    return varied and bool(((due - unit * last).abs() <= 1e-5 * due.abs()).all())


def with_target(given: list[Tensor], target: Tensor, root: tuple) -> tuple | None:
    """Return a call of a model, its target and the inputs that hold it: as a whole beside another input, or as the end of a longer
    series (N, T, F). (N, C, T) may hold what is given beside what is rebuilt."""
    if target.dim() not in (2, 3) or not 3 <= target.shape[1] <= WINDOW or len(target) < 4:
        return None
    series = [x for x in given if x.is_floating_point() and x.dim() in (2, 3) and len(x) == len(target)]
    if len(target.unique()) < 8 or not series:
        return None
    found = [x for x in series[1:] if x.shape == target.shape and torch.equal(x, target)]
    count, first = target.shape[1], target.reshape(*target.shape[:2], -1)[..., 0]
    for x in (x for x in series if x.dim() == 3 and x.shape[1] > max(count, x.shape[2])):
        found += [x] if any(torch.equal(x[:, -count:, c], first) for c in range(min(16, x.shape[2]))) else []
    return (*root, target, found) if found else None


def among_steps(given: list[Tensor], target: Tensor) -> Tensor | None:
    """Return the series (N, T, F), one of several, whose steps that count, in their order, are the target (M, F)."""
    series = [x for x in given if x.is_floating_point() and x.dim() == 3 and x.shape[1] > 3]
    if target.dim() != 2 or len(target) < 16 or len(series) < 2 or len(target.unique()) < 8:
        return None
    for x in series:
        steps = x.detach().flatten(0, 1)
        if x.shape[2] == target.shape[1] and len(target) <= len(steps) and len(steps) * target.numel() <= MOST * WINDOW:
            at = -1
            for row in target:  # rows at a limit occur several times
                found = (steps == row).all(1).nonzero().flatten().tolist()
                at = next((k for k in found if k > at), len(steps))
            if at < len(steps):
                return x
    return None


def joined(given: list[Tensor], target: Tensor, batches: Any) -> tuple[Tensor | None, list[Tensor]]:
    """Split a flat input (N, D + k) into the noisy sample (N, D) and the other columns (the noise level, in small nets). The noisy sample is the
    part that correlates more with the batch's sample."""
    every = [x for leaves in batches for x in leaves if x.is_floating_point()]
    clean = [x.reshape(target.shape) for x in every if x.numel() == target.numel()]
    n = target[0].numel()
    for i, x in enumerate(given):
        if (
            clean
            and x.dim() == target.dim() == 2
            and len(x) == len(target)
            and n < x.shape[1] <= n + COLUMNS
            and x.is_floating_point()
        ):
            parts = ((x[:, :n], x[:, n:]), (x[:, -n:], x[:, :-n]))
            part, rest = max(parts, key=lambda p: max(pearson(p[0], c) for c in clean))
            return part, [*given[:i], part, *(rest.split(1, 1) if rest.shape[1] <= FEW else ()), *given[i + 1 :]]
    return None, given


class Hidden:
    """Records noise that was added to samples which are no entry of the batch (latents): its share in each input, and the net's other inputs."""

    def __init__(self) -> None:
        self.shares: list[Tensor] = []
        self.conditions: dict[int, list[Tensor]] = {}
        self.entries = 0  # of one sample

    def add(self, noisy: Tensor, drawn: Tensor, given: list[Tensor]) -> None:
        """Note one call."""
        x, y = to_double(noisy.flatten(1)), to_double(drawn.flatten(1))
        self.entries = x.shape[1]
        self.shares.append((x * y).sum(1) / (y * y).sum(1))
        for i, v in enumerate(given):
            if v.numel() == len(x) and v.dim() in (1, 2):
                self.conditions.setdefault(i, []).append(to_double(v.detach().flatten()))

    def check(self) -> tuple[str, str, str] | None:
        """Return (what was measured, fault and its cause or None); None if too little was recorded."""
        share = torch.cat(self.shares) if self.shares else torch.zeros(0)
        if len(share) < 32 or len(self.shares) < 6:
            return None
        error = 4 / self.entries**0.5
        measured = f"{len(share)} inputs, share of the drawn noise {float(share.min()):.2f} to {float(share.max()):.2f}"
        if abs(float(share.mean())) < error / len(share) ** 0.5 and float(share.abs().max()) < 2 * error:
            return (
                measured,
                f"the target is drawn noise that is not in the model's input ({measured})",
                "the noise is drawn twice: once for the input and once for the loss",
            )
        levels = [x for x in map(torch.cat, self.conditions.values()) if len(x) == len(share) and len(x.unique()) >= 16]
        best = max((abs(spearman(x, share)) for x in levels), default=1.0)
        if len(share) >= 64 and float(share.std()) > error and best < 0.3:
            return (
                measured,
                f"{measured}: it has nothing to do with the time that the net gets (rank correlation {best:.2f})",
                "the time step is drawn twice: once to add the noise and once for the net",
            )
        return measured, "", ""


def white(x: Tensor) -> bool:
    """Return whether values look like independent draws from a normal distribution."""
    x = to_double(x.flatten())
    x = (x - x.mean()) / x.std()
    beside = float((x[1:] * x[:-1]).mean())
    return abs(float((x**4).mean()) - 3) < 0.5 and abs(float((x**3).mean())) < 0.3 and abs(beside) < 5 / len(x) ** 0.5


def unexplained_share(y: Tensor, *columns: Tensor) -> float:
    """Return the share of the variance of y that a linear fit leaves."""
    a = torch.stack([*columns, torch.ones_like(y)], 1)
    a = a / a.norm(dim=0).clamp_min(1e-30)
    return float((a @ torch.linalg.lstsq(a, y[:, None]).solution - y[:, None]).std() / y.std().clamp_min(1e-30))
