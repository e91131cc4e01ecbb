"""A class-conditional DDPM on 8x8 digits with an EMA of the weights; the score: how many samples a nearest neighbour takes for their class."""

import copy

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
STEPS = 100
digits = load_digits()
x = torch.tensor(digits.data / 8.0 - 1.0, dtype=torch.float32)  # -1 to 1
y = torch.tensor(digits.target)
train_set = TensorDataset(x, y)
judge = KNeighborsClassifier(3).fit(digits.data / 8.0 - 1.0, digits.target)

betas = torch.linspace(1e-3, 0.08, STEPS)
alphas = 1 - betas
alpha_bar = torch.cumprod(alphas, 0)


class Denoiser(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.time, self.label = nn.Embedding(STEPS, width), nn.Embedding(10, width)
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.last = nn.Linear(width, 64)

    def forward(self, noisy, t, label):
        h = self.first(noisy)
        for block in self.blocks:
            h = h + block(h + self.time(t) + self.label(label))
        return self.last(h)


class Diffusion:
    def __init__(self):
        self.model = Denoiser()
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train_epoch(self, loader):
        self.model.train()
        for clean, label in loader:
            t = torch.randint(0, STEPS, (len(clean),))
            noise = torch.randn_like(clean)
            a = alpha_bar[t].unsqueeze(1)
            noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
            loss = nn.functional.mse_loss(self.model(noisy, t, label), noise)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.update_ema()

    @torch.no_grad()
    def update_ema(self, decay=0.99):
        for slow, fast in zip(self.ema.parameters(), self.model.parameters()):
            slow.mul_(decay).add_(fast, alpha=1 - decay)

    @torch.no_grad()
    def sample(self, label):
        model = self.ema.eval()
        z = torch.randn(len(label), 64)
        for t in reversed(range(STEPS)):
            predicted = model(z, torch.full((len(label),), t), label)
            z = (z - betas[t] / (1 - alpha_bar[t]).sqrt() * predicted) / alphas[t].sqrt()
            if t > 0:
                z = z + betas[t].sqrt() * torch.randn_like(z)
        return z

    def recognised(self):
        label = torch.arange(10).repeat(30)
        return float((judge.predict(self.sample(label).numpy()) == label.numpy()).mean())


def make_script():
    diffusion = Diffusion()
    return trainworthy.Loop(
        models={"model": diffusion.model, "ema": diffusion.ema},
        optimizers=diffusion.optimizer,
        batches=DataLoader(train_set, batch_size=128, shuffle=True),
        run=diffusion.train_epoch,
        evaluate=diffusion.recognised,
    )


def main():
    torch.manual_seed(SEED)
    diffusion = Diffusion()
    loader = DataLoader(train_set, batch_size=128, shuffle=True)
    for epoch in range(100):
        diffusion.train_epoch(loader)
        if epoch % 25 == 24:
            print(epoch + 1, diffusion.recognised())
    print(f"FINAL recognised={diffusion.recognised():.4f}")


if __name__ == "__main__":
    main()
