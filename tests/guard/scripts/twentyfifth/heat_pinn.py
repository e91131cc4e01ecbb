"""Physics-informed network for the heat equation u_t = a u_xx on [0, 1], u(x, 0) = sin(pi x) + 0.5 sin(3 pi x), u = 0 at both ends."""

import math
import os
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    alpha: float = 0.05
    width: int = 32
    steps: int = 1500
    n_inside: int = 512
    n_border: int = 64
    lr: float = 4e-3
    weight_ic: float = 20.0
    weight_bc: float = 20.0
    seed: int = int(os.environ.get("SEED", "0"))


cfg = Config()


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1),
        )  # fmt: skip
        for m in self.layers:
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, x, t):
        return self.layers(torch.cat([2 * x - 1, 2 * t - 1], dim=1))


def start(x):
    return torch.sin(math.pi * x) + 0.5 * torch.sin(3 * math.pi * x)


def exact(x, t):
    k = cfg.alpha * math.pi**2
    return torch.exp(-k * t) * torch.sin(math.pi * x) + 0.5 * torch.exp(-9 * k * t) * torch.sin(3 * math.pi * x)


def residual(net, x, t):
    x.requires_grad_(True)
    t.requires_grad_(True)
    u = net(x, t)
    u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
    return u_t - cfg.alpha * u_xx


def losses(net):
    x, t = torch.rand(cfg.n_inside, 1), torch.rand(cfg.n_inside, 1)
    pde = residual(net, x, t).pow(2).mean()
    x0 = torch.rand(cfg.n_border, 1)
    ic = (net(x0, torch.zeros_like(x0)) - start(x0)).pow(2).mean()
    tb = torch.rand(cfg.n_border, 1)
    bc = net(torch.zeros_like(tb), tb).pow(2).mean() + net(torch.ones_like(tb), tb).pow(2).mean()
    return pde, ic, bc


@torch.no_grad()
def relative_error(net, n=101):
    xs, ts = torch.meshgrid(torch.linspace(0, 1, n), torch.linspace(0, 1, n), indexing="ij")
    x, t = xs.reshape(-1, 1), ts.reshape(-1, 1)
    u = exact(x, t)
    return (torch.linalg.norm(net(x, t) - u) / torch.linalg.norm(u)).item()


def main():
    torch.manual_seed(cfg.seed)
    net = Net(cfg.width)
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.05 ** (1 / cfg.steps))
    for step in range(1, cfg.steps + 1):
        pde, ic, bc = losses(net)
        loss = pde + cfg.weight_ic * ic + cfg.weight_bc * bc
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 300 == 0:
            print(
                f"step {step} pde {pde.item():.2e} ic {ic.item():.2e} bc {bc.item():.2e} error {relative_error(net):.4f}"
            )
    print(f"relative error {relative_error(net):.5f}")


if __name__ == "__main__":
    main()
