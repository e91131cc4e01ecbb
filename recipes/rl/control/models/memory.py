"""Memory of recurrent policies: the hidden state, carried from step to step with the observation.

A row that such a policy reads is (observation, 1 at the start of an episode and 0 elsewhere, the state before it: zeros at a
start). So a stored row is complete by itself. Gradients flow through sequences of consecutive rows: only the first row's state is
the stored one, and the others are computed again.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from trainworthy.core.base.errors import UserError
from trainworthy.recipes.rl.control.data.environments import Environments


class Memory(nn.Module):
    """A GRU (Cho 2014) that reads observations brought to scale. With a `size` of 0 there is none: rows are observations alone."""

    def __init__(self, n_obs: int, size: int):
        super().__init__()
        self.n_obs, self.size = n_obs, size
        self.row = n_obs + (1 + size if size else 0)  # numbers in a row
        if size:
            self.gru = nn.GRU(n_obs, size)
            for name, parameter in self.gru.named_parameters():
                nn.init.orthogonal_(parameter) if name.startswith("weight") else nn.init.zeros_(parameter)

    def forward(self, rows: Tensor, scaled: Callable[[Tensor], Tensor], through: bool = False) -> Tensor:
        """What the nets read, (..., n_obs + size): `scaled` observations, and what is remembered after each. `rows` (..., row); for
        `through`, stretches (B, T, row)."""
        if not self.size:
            return scaled(rows)
        observation, begun, state = rows.split([self.n_obs, 1, self.size], -1)
        x = scaled(observation)
        return torch.cat([x, self._through(x, begun, state[:, 0]) if through else self._once(x, state)], -1)

    def _once(self, x: Tensor, state: Tensor) -> Tensor:
        one = self.gru(x.reshape(1, -1, self.n_obs), state.reshape(1, -1, self.size))[0]
        return one.view(*x.shape[:-1], self.size)

    def _through(self, x: Tensor, begun: Tensor, state: Tensor) -> Tensor:
        """(B, T, size) from the states (B, size) before the first of T rows. The GRU runs on to the next beginning in any of the
        stretches; where those are is read from the device."""
        x, begun, found = x.transpose(0, 1), begun.transpose(0, 1).detach(), []
        cuts = [0, *(1 + begun[1:].flatten(1).any(1).nonzero().flatten()).tolist(), len(x)]
        for a, b in pairwise(cuts):
            states, last = self.gru(x[a:b], (state * (1 - begun[a]))[None])
            state = last[0]
            found.append(states)
        return torch.cat(found).transpose(0, 1)

    def carried(self, x: Tensor) -> tuple[Tensor, ...]:
        """The state in what `forward` gave: what the next row holds."""
        return (x[..., self.n_obs :],) if self.size else ()

    def describe(self, seen: str, output: str) -> dict[str, str]:
        """What an export says of its input and output, where `seen` is what it says of an observation."""
        if not self.size:
            return {"input": seen, "output": output}
        return {"input": f"float32 (B, {self.row}): {seen.partition(': ')[2]}; then 1 where an episode begins, else 0; then the "
                         f"state of {self.size}, zeros where an episode begins",
                "output": f"{output}; state (B, {self.size}) for the next row"}  # fmt: skip


def fits(size: int, stack: int, rollout: int, batch: int, world: int) -> None:
    """Raise UserError if a recurrent policy cannot be trained with these settings."""
    if size < 0 or (size and stack > 1):
        raise UserError("a policy has either a recurrent state or stacked frames", got=f"--rnn-hidden-size {size} --frame-stack {stack}",
                        needed="--rnn-hidden-size of 0 (none) or more, and with a memory --frame-stack 1")  # fmt: skip
    if size and batch % rollout:
        raise UserError("a recurrent policy needs minibatches of whole rollouts", got=batch,
                        needed=f"--train.batch-size that is a multiple of --num-steps {rollout}")  # fmt: skip
    if size and world > 1:
        raise UserError("a recurrent policy trains in one process", got=f"{world} processes", needed="-n 1, or --frame-stack",
                        cause="all environments of a minibatch may belong to another process")  # fmt: skip


@torch.no_grad()
def after(policy: nn.Module, rows: Tensor) -> Tensor:
    """Return the recurrent state after `rows` (B, row): (B, size), on the CPU."""
    device = policy.memory.gru.weight_ih_l0.device
    return policy.memory.carried(policy.memory(rows.to(device), policy.scaled))[0].float().cpu()


def beginning(policy: nn.Module, observation: Tensor) -> Tensor:
    """Return the input rows of episodes that start with `observation` (n, n_obs): (n, row)."""
    n = len(observation)
    return torch.cat([observation, torch.ones(n, 1), torch.zeros(n, policy.memory.size)], -1)


class Remembering:
    """`envs` with the recurrent state of `policy` appended to observations; the state is saved with them. `rows` are whole environments."""

    def __init__(self, envs: Environments, policy: nn.Module, rollout: int):
        self.envs, self.policy, self.rollout = envs, policy, rollout
        self.n, self.mine = envs.n, envs.mine
        self.state = torch.zeros(len(self.mine), policy.memory.size)
        self.begun = torch.ones(len(self.mine), 1)

    @property
    def observation(self) -> Tensor:
        return torch.cat([self.envs.observation, self.begun, self.state], -1)

    def step(self, actions: Tensor) -> dict[str, Tensor]:
        """As `envs.step`; `next_observation` holds the state after the observation that was acted on."""
        state = after(self.policy, self.observation)
        followed = self.envs.step(actions)
        goes_on = torch.zeros_like(self.begun)
        self.begun = (followed["terminated"] | followed["truncated"]).float()[:, None]
        self.state = state * (1 - self.begun)
        return followed | {"next_observation": torch.cat([followed["next_observation"], goes_on, state], -1)}

    def rows(self, order: Tensor) -> Tensor:
        """Return all rows of the environments `order` (k,): (k, steps), indices into (steps, n)."""
        return torch.arange(self.rollout) * self.n + order[:, None]

    def state_dict(self) -> dict[str, Any]:
        return {**self.envs.state_dict(), "state": self.state, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.envs.load_state_dict(state)
        self.state, self.begun = state["state"], state["begun"]


class Player:
    """Calls `act(model, rows)` for parallel episodes given their observations. Call `begin` before each episode."""

    def __init__(self, act: Callable[[nn.Module, Tensor], Tensor], model: nn.Module):
        self.act, self.model = act, model

    def begin(self) -> "Player":
        self.state: Tensor | None = None
        return self

    def __call__(self, observation: Tensor) -> Tensor:
        rows = beginning(self.model, observation)
        if self.state is not None:
            rows = torch.cat([observation, torch.zeros(len(observation), 1), self.state], -1)
        self.state = after(self.model, rows)
        return self.act(self.model, rows)


def player(act: Callable[[nn.Module, Tensor], Tensor], model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from observations to actions that `play` calls."""
    return Player(act, model) if model.memory.size else lambda observation: act(model, observation)
