"""What off-policy recipes learn from: transitions in a ring, and a copy of the net that lags behind."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

KEPT = ("observation", "action", "reward", "next_observation", "terminated", "truncated")


class Replay:
    """A ring of the newest `steps` steps of `n` environments. Every process holds the whole of it and draws the same from it.

    A checkpoint holds all that is filled: what its copy needs is never overwritten under it.
    """

    def __init__(self, steps: int, n: int, device: torch.device):
        self.steps, self.n, self.device = steps, n, device
        self.added = 0  # steps ever added
        self.rows: dict[str, Tensor] = {}  # (steps, n, ...), allocated once, by the first stretch
        self.born = torch.zeros(steps, dtype=torch.long)  # unit that played a step
        self.priority = torch.zeros(steps, n, device=device)  # what a transition's chance to be drawn grows with

    def __len__(self) -> int:
        """Steps of every environment that are held."""
        return min(self.added, self.steps)

    def age(self, unit: int) -> float:
        """How many units ago, on average, what is held was played."""
        return unit - self.born[: len(self)].double().mean().item()

    def add(self, stretch: dict[str, Tensor], unit: int) -> None:
        """Copy in consecutive steps (length, n, ...) that `unit` played; the oldest make room."""
        newest = {k: stretch[k][-self.steps :] for k in KEPT}
        length, skipped = len(newest["reward"]), max(0, len(stretch["reward"]) - self.steps)
        if not self.rows:
            self.rows = {k: v.new_zeros(self.steps, *v.shape[1:]) for k, v in newest.items()}
        at = (torch.arange(length, device=self.device) + self.added + skipped) % self.steps
        for k, v in newest.items():
            self.rows[k][at] = v
        self.born[at.cpu()] = unit
        self.priority[at] = self.priority.max() if self.added else 1.0  # drawn soon, then known
        self.added += length + skipped

    def draw(self, size: int, length: int, generator: torch.Generator, alpha: float = 0.0) -> tuple[Tensor, Tensor]:
        """(places (size,) of steps with `length` - 1 more after them, how many times likelier than by uniform chance each was to
        be drawn (size,)). `alpha`: 0 draws uniformly, 1 in proportion to `priority` (Schaul 2016)."""
        steps = len(self) - length + 1
        oldest = self.added - len(self)
        if not alpha:
            flat = torch.randint(steps * self.n, (size,), generator=generator).to(self.device)
            row = (oldest + flat // self.n) % self.steps
            return row * self.n + flat % self.n, torch.ones(size, device=self.device)
        share = self.priority**alpha  # 0 where nothing was ever written
        share[(torch.arange(self.added - length + 1, self.added, device=self.device)) % self.steps] = 0
        total = share.flatten().double().cumsum(0)
        point = torch.rand(size, generator=generator, dtype=torch.float64).to(self.device) * total[-1]
        place = torch.searchsorted(total, point, right=True).clamp_max(len(total) - 1)
        return place, (share.flatten()[place] / total[-1] * steps * self.n).float()

    def stretch(self, places: Tensor, length: int) -> dict[str, Tensor]:
        """`length` consecutive steps from each of `places` (B,): (length, B, ...)."""
        row = (places // self.n + torch.arange(length, device=self.device)[:, None]) % self.steps
        return {k: v[row, places % self.n] for k, v in self.rows.items()}

    def state_dict(self) -> dict[str, Any]:
        filled = {k: v[: len(self)] for k, v in self.rows.items()}
        return {"added": self.added, "rows": filled, "born": self.born[: len(self)],
                "priority": self.priority[: len(self)]}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.added = state["added"]
        self.rows = {k: v.new_zeros(self.steps, *v.shape[1:], device=self.device) for k, v in state["rows"].items()}
        for k, v in state["rows"].items():
            self.rows[k][: len(v)] = v
        self.born[: len(state["born"])] = state["born"].cpu()
        self.priority[: len(state["priority"])] = state["priority"]


class Target:
    """A copy of `net` (its buffers, too) that is never trained: what moving targets are computed with."""

    def __init__(self, net: nn.Module, device: torch.device):
        self.net = copy.deepcopy(net).requires_grad_(False).eval().to(device)

    @torch.no_grad()
    def follow(self, net: nn.Module, share: float = 1.0) -> None:
        """Go `share` of the way towards `net`: 1 copies it. Buffers are copied."""
        torch._foreach_lerp_([*self.net.parameters()], [*net.parameters()], share)
        for mine, theirs in zip(self.net.buffers(), net.buffers(), strict=True):
            mine.copy_(theirs)

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)
