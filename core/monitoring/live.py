"""Watches the loss while a run trains."""

import math
from dataclasses import dataclass, field

import numpy as np

WINDOW = 50  # blocks in the trailing window of spike detection
SPIKE = 20.0  # a spike is this many robust standard deviations above the window's median (healthy runs: up to 10), and
HEIGHT = 3.0  # this many times as far above the best level as the window's maximum (healthy runs: up to 2.1), and
SIZE = 0.1  # at least this fraction of all progress so far
SAMPLES = 64  # per block, because single small batches vary in healthy runs
LOST, STRETCH = 0.05, 0.05  # collapse: all but 5% of the progress is lost, for 5% of the run
LEARNT = 0.02  # fraction of the untrained loss that a healthy run has gained after a third of its steps
BLOWN = 5.0  # diverged: this many times the untrained loss, for as long (healthy runs: below 1 except spikes)


@dataclass
class Live:
    """Watches the loss in blocks of `SAMPLES` samples, for spikes and for a lasting collapse."""

    batch_size: int
    total: int
    """Steps of the whole run."""
    steps: int = 0
    """Steps so far."""
    first: float = math.nan
    """Loss of the untrained model: the mean of the first block."""
    best: float = math.inf
    """Lowest block so far."""
    window: list[float] = field(default_factory=list)
    block: list[float] = field(default_factory=list)
    spikes: list[int] = field(default_factory=list)
    """Step at which each spike began."""
    back: list[int] = field(default_factory=list)
    """Step at which each spike ended, if it did."""
    lost_since: int = 0
    """Step since which the loss is no better than untrained; 0 while it is better."""
    blown_since: int = 0
    """Step since which the loss is `BLOWN` times the untrained one; 0 while it is lower."""

    @property
    def size(self) -> int:
        return max(1, -(-SAMPLES // self.batch_size))

    @property
    def patience(self) -> int:
        """Steps without progress after which the run counts as collapsed."""
        return max(100, round(STRETCH * self.total), WINDOW * self.size)

    def see(self, step: int, loss: float) -> str:
        """Process one step's loss. Returns "spike" if one begins, "collapse" if all progress is lost, "diverged" if the
        loss has been far above the untrained one for as long."""
        self.steps += 1
        if not math.isfinite(loss):  # the finite check handles it
            return ""
        self.block.append(loss)
        if len(self.block) < self.size:
            return ""
        level, self.block = sum(self.block) / len(self.block), []
        if math.isnan(self.first):
            self.first = level
        self.best = min(self.best, level)
        spiked = self._spike(step, level)
        self.window = [*self.window, level][-WINDOW:]
        learnt = self.first - self.best
        lost = learnt > 0.1 * abs(self.first) and level > self.first - LOST * learnt
        self.lost_since = (self.lost_since or step) if lost else 0
        blown = level > max(BLOWN * abs(self.first), self.first)
        self.blown_since = (self.blown_since or step) if blown else 0
        if self.blown_since and step - self.blown_since >= self.patience:
            return "diverged"
        if self.lost_since and step - self.lost_since >= self.patience:
            return "collapse"
        return "spike" if spiked else ""

    @property
    def learns(self) -> bool:
        """Return whether the loss of the last blocks is below the untrained one. True until there are enough blocks to
        decide."""
        if math.isnan(self.first) or self.steps < max(self.patience, self.total / 3):
            return True
        return sum(self.window) / len(self.window) < self.first - LEARNT * abs(self.first)

    def _spike(self, step: int, level: float) -> bool:
        """Return whether a spike begins here. Also ends a spike once the loss is back in the window's range."""
        if len(self.window) < WINDOW:
            return False
        middle = float(np.median(self.window))
        scale = 1.4826 * float(np.median(np.abs(np.array(self.window) - middle)))
        if len(self.back) < len(self.spikes):
            if level <= max(self.window[: WINDOW // 2]):
                self.back.append(step)
            return False
        tall = level - self.best > HEIGHT * (max(self.window) - self.best)
        high = tall and level - middle > max(SPIKE * scale, SIZE * (self.first - self.best))
        if high:
            self.spikes.append(step)
        return high
