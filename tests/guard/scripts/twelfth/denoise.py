"""A denoising autoencoder on scikit-learn's digits, checked as a loop: noise is added in the loop, clean pixels are the target."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
NOISE = 0.4

images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
train_set, val_set = TensorDataset(images[order[:1400]]), TensorDataset(images[order[1400:]])


class Denoiser(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, x):
        return self.decoder(self.encoder(x)).sigmoid()


def train_epoch(model, optimizer, loader):
    model.train()
    for (clean,) in loader:
        noisy = clean + NOISE * torch.randn_like(clean)
        loss = nn.functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def psnr(model):
    """Peak signal-to-noise ratio in dB on the held-out digits with fixed noise."""
    model.eval()
    generator = torch.Generator().manual_seed(7)
    errors = []
    for (clean,) in DataLoader(val_set, 128):
        noisy = clean + NOISE * torch.randn(clean.shape, generator=generator)
        errors.append((model(noisy) - clean).pow(2).flatten(1).mean(1))
    return (-10 * torch.cat(errors).mean().log10()).item()


def make_script():
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return trainworthy.Loop(
        models=model,
        optimizers=optimizer,
        batches=DataLoader(train_set, 64, shuffle=True),
        run=lambda batches: train_epoch(model, optimizer, batches),
        evaluate=lambda: psnr(model),
        target="0",
    )


def main():
    torch.manual_seed(SEED)
    loop = make_script()
    for epoch in range(6):
        loop.run(loop.batches)
        print(f"epoch {epoch}: PSNR {loop.evaluate():.2f} dB")
    print(f"FINAL psnr={loop.evaluate():.3f}")


if __name__ == "__main__":
    main()
