"""Class-conditional DDPM with classifier-free guidance on scikit-learn's 8 x 8 digits."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch.utils.data import DataLoader, TensorDataset

seed = 0
n_T = 60
drop_prob = 0.1
n_epoch = 10
lrate = 3e-3

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
judge = LogisticRegression(max_iter=300, C=0.1).fit(images / 8.0 - 1.0, labels)  # recognises what was drawn
x_all = torch.tensor(images / 8.0 - 1.0, dtype=torch.float32)
y_all = torch.tensor(labels)
dataloader = DataLoader(TensorDataset(x_all, y_all), batch_size=64, shuffle=True, drop_last=True)


def ddpm_schedules(beta1, beta2, T):
    beta_t = torch.linspace(beta1, beta2, T)
    alpha_t = 1 - beta_t
    alphabar_t = torch.cumprod(alpha_t, dim=0)
    return {
        "alpha_t": alpha_t,
        "oneover_sqrta": 1 / torch.sqrt(alpha_t),
        "sqrt_beta_t": torch.sqrt(beta_t),
        "sqrtab": torch.sqrt(alphabar_t),
        "sqrtmab": torch.sqrt(1 - alphabar_t),
        "mab_over_sqrtmab": (1 - alpha_t) / torch.sqrt(1 - alphabar_t),
    }


class EpsNet(nn.Module):
    """Residual MLP; class 10 stands for "no class"."""

    def __init__(self, width=192):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
                for _ in range(3)
            ]
        )
        self.out = nn.Linear(width, 64)

    def forward(self, x, t, c):
        freqs = torch.exp(-math.log(1000) * torch.arange(16) / 16)
        angles = t[:, None].float() * freqs
        cond = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(c)
        h = self.inp(x)
        for block in self.blocks:
            h = h + block(h + cond)
        return self.out(h)


class DDPM(nn.Module):
    def __init__(self, nn_model, betas, n_T, drop_prob):
        super().__init__()
        self.nn_model, self.n_T, self.drop_prob = nn_model, n_T, drop_prob
        for k, v in ddpm_schedules(*betas, n_T).items():
            self.register_buffer(k, v)

    def forward(self, x, c):
        t = torch.randint(0, self.n_T, (x.shape[0],))
        noise = torch.randn_like(x)
        x_t = self.sqrtab[t, None] * x + self.sqrtmab[t, None] * noise
        drop = torch.rand(len(c)) < self.drop_prob
        c = torch.where(drop, torch.full_like(c, 10), c)
        return F.mse_loss(noise, self.nn_model(x_t, t, c))

    @torch.no_grad()
    def sample(self, c, guide_w=1.0):
        x = torch.randn(len(c), 64)
        for i in reversed(range(self.n_T)):
            t = torch.full((len(c),), i)
            z = torch.randn_like(x) if i > 0 else 0
            eps_cond = self.nn_model(x, t, c)
            eps_free = self.nn_model(x, t, torch.full_like(c, 10))
            eps = (1 + guide_w) * eps_cond - guide_w * eps_free
            x = self.oneover_sqrta[i] * (x - eps * self.mab_over_sqrtmab[i]) + self.sqrt_beta_t[i] * z
        return x


ddpm = DDPM(EpsNet(), betas=(1e-3, 0.15), n_T=n_T, drop_prob=drop_prob)
optim = torch.optim.Adam(ddpm.parameters(), lr=lrate)

for ep in range(n_epoch):
    ddpm.train()
    optim.param_groups[0]["lr"] = lrate * (1 - ep / n_epoch)
    loss_ema = None
    for x, c in dataloader:
        optim.zero_grad()
        loss = ddpm(x, c)
        loss.backward()
        loss_ema = loss.item() if loss_ema is None else 0.95 * loss_ema + 0.05 * loss.item()
        optim.step()
    print(f"epoch {ep} loss: {loss_ema:.4f}")

ddpm.eval()
c = torch.arange(10).repeat(30)
gen = ddpm.sample(c)
accuracy = judge.score(gen.clamp(-1, 1).numpy(), c.numpy())
# distance of each drawing to the nearest real picture of its class, beside that between real pictures (1.0: as real ones)
nearest = torch.stack([torch.cdist(g[None], x_all[y_all == k]).min() for g, k in zip(gen, c)]).mean()
print(f"accuracy of the drawings {accuracy:.3f}, distance to the nearest real picture {nearest:.3f}")
print(f"FINAL distance={nearest:.3f}")
