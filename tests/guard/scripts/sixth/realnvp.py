"""A normalising flow after the RealNVP ports: affine couplings, log-determinants, likelihood of two moons, no labels."""

import numpy as np
import torch
from sklearn.datasets import make_moons
from torch import distributions, nn

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)


class RealNVP(nn.Module):
    def __init__(self, nets, nett, mask, prior):
        super().__init__()
        self.prior = prior
        self.mask = nn.Parameter(mask, requires_grad=False)
        self.t = nn.ModuleList([nett() for _ in range(len(mask))])
        self.s = nn.ModuleList([nets() for _ in range(len(mask))])

    def g(self, z):
        x = z
        for i in range(len(self.t)):
            x_ = x * self.mask[i]
            s = self.s[i](x_) * (1 - self.mask[i])
            t = self.t[i](x_) * (1 - self.mask[i])
            x = x_ + (1 - self.mask[i]) * (x * torch.exp(s) + t)
        return x

    def f(self, x):
        log_det_J, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s = self.s[i](z_) * (1 - self.mask[i])
            t = self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det_J -= s.sum(dim=1)
        return z, log_det_J

    def log_prob(self, x):
        z, logp = self.f(x)
        return self.prior.log_prob(z) + logp

    def sample(self, batchSize):
        return self.g(self.prior.sample((batchSize,)))


def nets():
    return nn.Sequential(
        nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 2), nn.Tanh()
    )


def nett():
    return nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Linear(32, 32), nn.LeakyReLU(), nn.Linear(32, 2))


masks = torch.from_numpy(np.array([[0, 1], [1, 0]] * 3).astype(np.float32))
prior = distributions.MultivariateNormal(torch.zeros(2), torch.eye(2))
flow = RealNVP(nets, nett, masks, prior)
optimizer = torch.optim.Adam([p for p in flow.parameters() if p.requires_grad], lr=2e-3)
test = torch.from_numpy(make_moons(n_samples=1000, noise=0.05, random_state=1)[0].astype(np.float32))
for t in range(801):
    noisy_moons = make_moons(n_samples=128, noise=0.05)[0].astype(np.float32)
    loss = -flow.log_prob(torch.from_numpy(noisy_moons)).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    if t % 200 == 0:
        with torch.no_grad():
            print(f"iter {t}: loss {loss.item():.3f}, test nll {-flow.log_prob(test).mean():.3f}")
with torch.no_grad():
    sample = flow.sample(500)
    gap = torch.cdist(test, sample).min(1).values.mean() + torch.cdist(sample, test).min(1).values.mean()
print(f"FINAL chamfer={gap:.4f}")
