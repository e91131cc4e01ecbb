"""DDPM on the digits (8x8): linear betas, a small U-Net with time embedding, ancestral sampling, Frechet distance of the samples."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

batch_size = 128
timesteps = 100
epochs = 30
learning_rate = 2e-3


def sinusoidal_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([args.sin(), args.cos()], dim=-1)


class Block(nn.Module):
    def __init__(self, in_ch, out_ch, time_dim):
        super().__init__()
        self.time_mlp = nn.Linear(time_dim, out_ch)
        self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, out_ch)
        self.norm2 = nn.GroupNorm(4, out_ch)

    def forward(self, x, temb):
        h = F.silu(self.norm1(self.conv1(x)))
        h = h + self.time_mlp(temb)[:, :, None, None]
        return F.silu(self.norm2(self.conv2(h)))


class UNet(nn.Module):
    def __init__(self, ch=24, time_dim=48):
        super().__init__()
        self.time_dim = time_dim
        self.time_mlp = nn.Sequential(nn.Linear(time_dim, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.inc = Block(1, ch, time_dim)
        self.down = Block(ch, ch * 2, time_dim)
        self.mid = Block(ch * 2, ch * 2, time_dim)
        self.up = nn.ConvTranspose2d(ch * 2, ch, 2, stride=2)
        self.dec = Block(ch * 2, ch, time_dim)
        self.outc = nn.Conv2d(ch, 1, 1)

    def forward(self, x, t):
        temb = self.time_mlp(sinusoidal_embedding(t, self.time_dim))
        x1 = self.inc(x, temb)
        x2 = self.down(F.avg_pool2d(x1, 2), temb)
        x2 = self.mid(x2, temb)
        x = torch.cat([self.up(x2), x1], dim=1)
        return self.outc(self.dec(x, temb))


class GaussianDiffusion:
    def __init__(self, timesteps, beta_start=1e-3, beta_end=0.12):
        self.timesteps = timesteps
        self.betas = torch.linspace(beta_start, beta_end, timesteps)
        self.alphas = 1.0 - self.betas
        self.alphas_cumprod = torch.cumprod(self.alphas, dim=0)
        alphas_cumprod_prev = F.pad(self.alphas_cumprod[:-1], (1, 0), value=1.0)
        self.posterior_variance = self.betas * (1.0 - alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)

    def q_sample(self, x0, t, noise):
        a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def p_losses(self, model, x0):
        t = torch.randint(0, self.timesteps, (x0.shape[0],))
        noise = torch.randn_like(x0)
        x_noisy = self.q_sample(x0, t, noise)
        return F.mse_loss(model(x_noisy, t), noise)

    @torch.no_grad()
    def sample(self, model, n):
        model.eval()
        x = torch.randn(n, 1, 8, 8)
        for i in reversed(range(self.timesteps)):
            t = torch.full((n,), i, dtype=torch.long)
            eps = model(x, t)
            coef = self.betas[i] / (1 - self.alphas_cumprod[i]).sqrt()
            x = (x - coef * eps) / self.alphas[i].sqrt()
            if i > 0:
                x = x + self.posterior_variance[i].sqrt() * torch.randn_like(x)
        model.train()
        return x.clamp(-1, 1)


class EMA:
    def __init__(self, model, decay=0.98):
        self.decay = decay
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters()}

    def update(self, model):
        for k, v in model.named_parameters():
            self.shadow[k].lerp_(v.detach(), 1 - self.decay)

    def apply_to(self, model):
        self.backup = {k: v.detach().clone() for k, v in model.named_parameters()}
        with torch.no_grad():
            for k, v in model.named_parameters():
                v.copy_(self.shadow[k])

    def restore(self, model):
        with torch.no_grad():
            for k, v in model.named_parameters():
                v.copy_(self.backup[k])


def frechet(a, b):
    """Frechet distance of two sets of images, in pixels."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    ca, cb = torch.cov(a.T), torch.cov(b.T)
    root = torch.linalg.eigvals(ca @ cb).real.clamp(min=0).sqrt().sum()
    return ((a.mean(0) - b.mean(0)).square().sum() + ca.trace() + cb.trace() - 2 * root).item()


torch.manual_seed(0)
images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
images = images * 2 - 1
train, test = images[:1400], images[1400:]
dataloader = DataLoader(TensorDataset(train), batch_size=batch_size, shuffle=True, drop_last=True)

model = UNet()
diffusion = GaussianDiffusion(timesteps)
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
ema = EMA(model)

for epoch in range(epochs):
    running = 0.0
    for (x,) in dataloader:
        optimizer.zero_grad()
        loss = diffusion.p_losses(model, x)
        loss.backward()
        optimizer.step()
        ema.update(model)
        running += loss.item()
    if epoch % 10 == 9:
        print(f"epoch {epoch + 1}: loss {running / len(dataloader):.4f}")

ema.apply_to(model)
samples = diffusion.sample(model, 400)
torch.save(model.state_dict(), "ddpm_ema.pt")
ema.restore(model)
torch.save(samples, "samples.pt")
print(f"Frechet distance of the samples {frechet(samples, test):.3f} (training images {frechet(train, test):.3f})")
