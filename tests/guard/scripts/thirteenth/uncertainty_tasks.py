"""Three tasks on one trunk, weighted by learned uncertainties (Kendall): which digit, how much ink, the picture without noise."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Tasks(Dataset):
    def __init__(self, images, labels, noise, seed):
        g = torch.Generator().manual_seed(seed)
        self.clean = images
        self.noisy = (images + noise * torch.randn(images.shape, generator=g)).clamp(0, 1)
        self.labels, self.ink = labels, images.flatten(1).mean(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"image": self.noisy[i], "digit": self.labels[i], "ink": self.ink[i], "clean": self.clean[i]}


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU()
        )
        self.digit, self.ink, self.clean = nn.Linear(96, 10), nn.Linear(96, 1), nn.Linear(96, 64)

    def forward(self, image):
        h = self.trunk(image)
        return {"digit": self.digit(h), "ink": self.ink(h).squeeze(-1), "clean": self.clean(h).view_as(image)}


class UncertaintyLoss(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.log_var = nn.ParameterDict({n: nn.Parameter(torch.zeros(())) for n in names})

    def forward(self, losses):
        return sum(torch.exp(-self.log_var[n]) * loss + 0.5 * self.log_var[n] for n, loss in losses.items())


def losses_of(output, batch):
    return {
        "digit": F.cross_entropy(output["digit"], batch["digit"]),
        "ink": F.mse_loss(output["ink"], batch["ink"]),
        "clean": F.l1_loss(output["clean"], batch["clean"]),
    }


def validate(model, loader):
    model.eval()
    right, ink, clean, n = 0, 0.0, 0.0, 0
    with torch.no_grad():
        for batch in loader:
            out = model(batch["image"])
            right += (out["digit"].argmax(1) == batch["digit"]).sum().item()
            ink += F.mse_loss(out["ink"], batch["ink"], reduction="sum").item()
            clean += F.l1_loss(out["clean"], batch["clean"], reduction="none").mean((1, 2)).sum().item()
            n += len(batch["digit"])
    return right / n, ink / n, clean / n


def main():
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    train = DataLoader(Tasks(images[:1400], labels[:1400], 0.2, 0), batch_size=64, shuffle=True)
    val = DataLoader(Tasks(images[1400:], labels[1400:], 0.2, 1), batch_size=128)
    model, weighting = Trunk(), UncertaintyLoss(["digit", "ink", "clean"])
    optimizer = torch.optim.Adam(
        [{"params": model.parameters()}, {"params": weighting.parameters(), "lr": 1e-2}], lr=2e-3
    )
    for epoch in range(12):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            loss = weighting(losses_of(model(batch["image"]), batch))
            loss.backward()
            optimizer.step()
        accuracy, ink, clean = validate(model, val)
        print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {accuracy:.4f} ink mse {ink:.5f} clean mae {clean:.4f}")
    print(f"FINAL accuracy={accuracy:.4f}")


if __name__ == "__main__":
    main()
