"""Action distributions: what a policy net's outputs mean, and how actions are drawn. One class per kind of action
space."""

import math

import torch
from gymnasium.spaces import Box, Discrete, Space
from torch import Tensor, nn


class Categorical(nn.Module):
    """One of `n` actions; the net's outputs are log-probabilities."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def forward(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    def noise(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Return Gumbel noise (*shape, n): the argmax of log-probabilities + noise is a sample."""
        return -(-torch.rand(*shape, self.n, generator=generator).clamp_min(1e-20).log()).log()

    def draw(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return (outputs + noise).argmax(-1)

    def best(self, outputs: Tensor) -> Tensor:
        """Return the most likely action (B,)."""
        return outputs.argmax(-1)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        return outputs.gather(-1, action[..., None]).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return -(outputs.exp() * outputs).sum(-1)

    def near(self, outputs: Tensor, best: Tensor) -> Tensor:
        """Return the probability of the actions `best` (B,)."""
        return self.log_prob(outputs, best).exp()


class Gaussian(nn.Module):
    """Vectors of length `n`, clipped to [-1, 1] for the environment. The outputs are means and log standard deviations, (B, 2n); the latter
    are parameters that do not depend on the observation (Andrychowicz 2021). Log-probabilities are those of the unclipped sample, because
    a clipped one has no density at the bound."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n
        self.log_std = nn.Parameter(torch.zeros(n))

    def forward(self, mean: Tensor) -> Tensor:
        return torch.cat([mean, self.log_std.expand_as(mean)], -1)

    def noise(self, *shape: int, generator: torch.Generator) -> Tensor:
        """Return standard normal noise (*shape, n)."""
        return torch.randn(*shape, self.n, generator=generator)

    def draw(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = outputs.chunk(2, -1)
        return mean + log_std.exp() * noise

    def best(self, outputs: Tensor) -> Tensor:
        """Return the mean (B, n)."""
        return outputs.chunk(2, -1)[0].clamp(-1, 1)

    def log_prob(self, outputs: Tensor, action: Tensor) -> Tensor:
        """Return the sum over the components of an action (B,)."""
        mean, log_std = outputs.chunk(2, -1)
        far = (action - mean) / log_std.exp()
        return (-0.5 * far.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        return (outputs.chunk(2, -1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def near(self, outputs: Tensor, best: Tensor) -> Tensor:
        """Return 1 where the mean is `best` (B, n), 0 at the other end of the range."""
        return 1 - (self.best(outputs) - best).abs().amax(-1) / 2


HEADS: dict[type[Space], type[nn.Module]] = {Discrete: Categorical, Box: Gaussian}
