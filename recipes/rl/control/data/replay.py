"""Replay buffer (a ring of transitions) and target network of off-policy recipes."""

import copy
import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.doubles import to_double
from trainworthy.core.base.errors import UserError
from trainworthy.core.loop.checkpoint import Segment
from trainworthy.core.loop.optim import exact

KEPT = ("observation", "action", "reward", "next_observation", "terminated", "truncated")


def fits(n_step: int, rollout: int, capacity: int, envs: int, first: int) -> None:
    """Raise UserError if an iteration's steps, or the `first` transitions, do not fit into the buffer."""
    if not n_step <= rollout <= capacity // envs:
        raise UserError("the steps of an iteration do not fit", got=f"{n_step}, {rollout}, {capacity}",
                        needed=f"--n-step <= --num-steps <= --buffer-size / {envs} environments")  # fmt: skip
    if first > capacity:
        raise UserError("the buffer forgets transitions before the first update", got=f"--learning-starts {first}, --buffer-size {capacity}",
                        needed="--buffer-size in transitions, at least --learning-starts",
                        cause="the buffer was counted in episodes or rollouts")  # fmt: skip


class Replay:
    """A ring buffer of the newest `steps` steps of `n` environments. Every process holds all of it and draws the same samples.

    A checkpoint holds all filled steps. At each save the steps that were added since the last one become a segment file, which later
    checkpoints link to. A segment stays complete on disk when its steps are overwritten in the ring.
    """

    def __init__(self, steps: int, n: int, device: torch.device):
        self.steps, self.n, self.device = steps, n, device
        self.added = 0  # steps added so far
        self.cuts = [0]  # boundaries of the segments, in steps added so far
        self.rows: dict[str, Tensor] = {}  # (steps, n, ...), allocated at the first add()
        self.born = torch.zeros(steps, dtype=torch.long)  # rollout that a step comes from
        self.priority = torch.zeros(steps, n, device=device)  # sampling priority of each transition

    def __len__(self) -> int:
        """Return the number of filled steps per environment."""
        return min(self.added, self.steps)

    def release(self) -> None:
        """Free the steps: the buffer is not used any more."""
        self.rows, self.priority = {}, self.priority[:0].clone()

    def age(self, iteration: int) -> float:
        """Return the mean age of the held steps, in rollouts."""
        return iteration - to_double(self.born[: len(self)]).mean().item()

    def add(self, stretch: dict[str, Tensor], iteration: int) -> None:
        """Copy in consecutive steps (length, n, ...) of rollout `iteration`, over the oldest ones."""
        newest = {k: stretch[k][-self.steps :] for k in KEPT}
        length, skipped = len(newest["reward"]), max(0, len(stretch["reward"]) - self.steps)
        if not self.rows:
            self.rows = {k: v.new_zeros(self.steps, *v.shape[1:]) for k, v in newest.items()}
        at = (torch.arange(length, device=self.device) + self.added + skipped) % self.steps
        for k, v in newest.items():
            self.rows[k][at] = v
        self.born[at.cpu()] = iteration
        # New steps get the highest priority until they are drawn
        self.priority[at] = self.priority.max() if self.added else 1.0
        self.added += length + skipped

    def draw(self, size: int, length: int, generator: torch.Generator, alpha: float = 0.0) -> tuple[Tensor, Tensor]:
        """Draw steps that have `length` - 1 more after them. Return (their places (size,), their probability relative to uniform sampling
        (size,)). `alpha`: 0 draws uniformly, 1 in proportion to `priority` (Schaul 2016)."""
        steps = len(self) - length + 1
        oldest = self.added - len(self)
        if not alpha:
            flat = torch.randint(steps * self.n, (size,), generator=generator).to(self.device)
            row = (oldest + flat // self.n) % self.steps
            return row * self.n + flat % self.n, torch.ones(size, device=self.device)
        share = self.priority**alpha  # 0 for places that were never written
        share[(torch.arange(self.added - length + 1, self.added, device=self.device)) % self.steps] = 0
        total = exact(share.flatten()).cumsum(0)
        point = torch.rand(size, generator=generator, dtype=torch.float64).to(total.dtype).to(self.device) * total[-1]
        place = torch.searchsorted(total, point, right=True).clamp_max(len(total) - 1)
        return place, (share.flatten()[place] / total[-1] * steps * self.n).float()

    def stretch(self, places: Tensor, length: int) -> dict[str, Tensor]:
        """Return `length` consecutive steps from each of `places` (B,): (length, B, ...)."""
        size = self.steps * self.n  # consecutive steps are n places apart
        at = (places + self.n * torch.arange(length, device=self.device)[:, None]) % size
        return {k: v.flatten(0, 1)[at] for k, v in self.rows.items()}

    def state_dict(self) -> dict[str, Any]:
        oldest = self.added - len(self)
        cuts = [*self.cuts, self.added] if self.added > self.cuts[-1] else self.cuts
        self.cuts = [a for a, b in pairwise([*cuts, math.inf]) if b > oldest]
        segments = {f"{a}-{b}": Segment(partial(self._rows, a, b)) for a, b in pairwise(self.cuts)}
        some = self.priority[: len(self)]
        alike = len(some) and (some == some[0, 0]).all()  # all equal: prioritised sampling is off
        return {"added": self.added, "segments": segments, "priority": some[:1, :1] if alike else some}

    def _rows(self, begin: int, end: int) -> dict[str, Tensor]:
        """Return the steps from `begin` to `end` that are still held, with their numbers."""
        step = torch.arange(max(begin, self.added - len(self)), end)
        at = step % self.steps
        return {"step": step, "born": self.born[at], **{k: v[at.to(self.device)] for k, v in self.rows.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.added = state["added"]
        self.cuts = sorted({int(step) for name in state["segments"] for step in name.split("-")}) or [0]
        for segment in state["segments"].values():
            rows = segment.read()
            held = rows["step"] >= self.added - len(self)
            at = rows.pop("step")[held] % self.steps
            self.born[at] = rows.pop("born")[held]
            for k, v in rows.items():
                if k not in self.rows:
                    self.rows[k] = v.new_zeros(self.steps, *v.shape[1:], device=self.device)
                self.rows[k][at.to(self.device)] = v[held].to(self.device)
        self.priority[: len(self)] = state["priority"].to(self.device)


class Target:
    """A copy of `net` with its buffers that is never trained: the target network.

    `scale`: the module of `net` whose buffers its outputs are multiplied by. They move as the parameters do. If they were copied while the
    parameters lag, returns would grow with their own scale."""

    def __init__(self, net: nn.Module, device: torch.device, scale: str = ""):
        self.scale = scale
        self.net = copy.deepcopy(net).requires_grad_(False).eval().to(device)
        self.followed: nn.Module | None = None
        # What moves and what is copied, of the target and then of the followed net
        self.tensors: list[list[Tensor]] = []

    @torch.no_grad()
    def follow(self, net: nn.Module, share: float = 1.0) -> None:
        """Move the parameters and the scale by `share` towards those of `net`; 1 copies them. Other buffers are always copied."""
        if net is not self.followed:  # looked up once: walking the modules costs as much as the update itself
            self.followed, self.tensors = net, [part for m in (self.net, net) for part in self._parts(m)]
        mine, my_copies, theirs, their_copies = self.tensors
        torch._foreach_lerp_(mine, theirs, share)
        torch._foreach_copy_(my_copies, their_copies)

    def _parts(self, net: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return what moves by a share, and what is copied."""
        moves, copies = [*net.parameters()], []
        for name, value in net.named_buffers():
            lags = self.scale and f".{self.scale}." in f".{name}" and value.is_floating_point()
            (moves if lags else copies).append(value)
        return moves, copies

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state)
