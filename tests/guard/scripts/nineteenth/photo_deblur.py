"""Sharp photographs from blurred ones: a small residual CNN on random crops, PSNR against the blurred picture."""

import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset

SEED = 0
random.seed(SEED)
np.random.seed(SEED)
torch.manual_seed(SEED)


def to_tensor(image):
    return torch.from_numpy(image.astype(np.float32) / 255.0).permute(2, 0, 1)


def blur(picture):
    kernel = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0])
    kernel = torch.outer(kernel, kernel)
    kernel = (kernel / kernel.sum()).expand(3, 1, 5, 5)
    padded = F.pad(picture.unsqueeze(0), (2, 2, 2, 2), mode="reflect")
    return F.conv2d(padded, kernel, groups=3).squeeze(0)


class Crops(Dataset):
    """Random crops: the blurred input and the sharp target."""

    def __init__(self, pictures, size=24, count=1200):
        self.sharp = pictures
        self.blurred = [blur(p) for p in pictures]
        self.size, self.count = size, count

    def __len__(self):
        return self.count

    def random_crop(self, *pictures):
        top = random.randrange(pictures[0].shape[1] - self.size)
        left = random.randrange(pictures[0].shape[2] - self.size)
        return [p[:, top : top + self.size, left : left + self.size] for p in pictures]

    def __getitem__(self, i):
        k = i % len(self.sharp)
        blurred, sharp = self.random_crop(self.blurred[k], self.sharp[k])
        return blurred, sharp


class DeblurNet(nn.Module):
    def __init__(self, channels=3, width=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, channels, 3, padding=1),
        )

    def forward(self, x):
        return x + self.body(x)


def psnr(a, b):
    return 10 * math.log10(1.0 / F.mse_loss(a.clamp(0, 1), b).item())


def main():
    photos = load_sample_images().images
    left = [to_tensor(p[:, :440]) for p in photos]
    right = [to_tensor(p[100:300, 440:]) for p in photos]
    train_loader = DataLoader(Crops(left), batch_size=16, shuffle=True, drop_last=True)
    test_pairs = [(blur(p), p) for p in right]

    model = DeblurNet()
    criterion = nn.L1Loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    def validate():
        model.eval()
        with torch.no_grad():
            ours = np.mean([psnr(model(b.unsqueeze(0)).squeeze(0), p) for b, p in test_pairs])
        return ours, ours - np.mean([psnr(b, p) for b, p in test_pairs])

    for epoch in range(7):
        model.train()
        losses = []
        for blurred, sharp in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(blurred), sharp)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        score, gain = validate()
        print(f"epoch {epoch + 1}: l1 {np.mean(losses):.5f}, test psnr {score:.2f} dB (gain {gain:+.2f} dB)")
    print(f"FINAL gain_db={validate()[1]:.3f}")


if __name__ == "__main__":
    main()
