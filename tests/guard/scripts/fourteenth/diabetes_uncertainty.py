"""Progression of diabetes with an interval: heteroscedastic regression, and dropout kept alive for predictions (MC dropout).

Reports RMSE, the negative log-likelihood, and how many patients lie within the 90% interval, all in the target's units.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset


@dataclass
class Scale:
    mean: Tensor
    std: Tensor

    def apply(self, value: Tensor) -> Tensor:
        return (value - self.mean) / self.std


class MeanVariance(nn.Module):
    """Two heads: the mean and the logarithm of the variance."""

    def __init__(self, features: int, hidden: int = 64, p: float = 0.15) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(features, hidden), nn.SiLU(), nn.Dropout(p), nn.Linear(hidden, hidden), nn.SiLU(), nn.Dropout(p)
        )
        self.mean = nn.Linear(hidden, 1)
        self.log_variance = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.mean(h), self.log_variance(h).clamp(-6, 4)


def gaussian_nll(mean: Tensor, log_variance: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (log_variance + (y - mean) ** 2 / log_variance.exp() + math.log(2 * math.pi)).mean()


def keep_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()


@torch.no_grad()
def predict(model: nn.Module, x: Tensor, passes: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over passes with dropout: what the model says plus how much it varies."""
    model.eval()
    keep_dropout(model)
    means, variances = zip(*(model(x) for _ in range(passes)))
    means = torch.stack(means)
    variance = torch.stack(variances).exp().mean(0) + means.var(0)
    return means.mean(0).squeeze(1), variance.sqrt().squeeze(1)


def evaluate(model: nn.Module, loader: DataLoader, y_scale: Scale, passes: int) -> dict[str, float]:
    squared = nll = inside = count = 0.0
    for x, y in loader:
        mean, sigma = predict(model, x, passes)
        mean, sigma = mean * y_scale.std + y_scale.mean, sigma * y_scale.std
        y = y * y_scale.std + y_scale.mean
        squared += ((mean - y) ** 2).sum().item()
        nll += -torch.distributions.Normal(mean, sigma).log_prob(y).sum().item()
        inside += ((y - mean).abs() < 1.645 * sigma).sum().item()
        count += len(y)
    return {"rmse": math.sqrt(squared / count), "nll": nll / count, "coverage": inside / count}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=1e-3)
    parser.add_argument("--mc_passes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save_to", default="/tmp/diabetes_uncertainty.pt")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    features, target = load_diabetes(return_X_y=True, scaled=False)
    x, y = torch.tensor(features, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)
    order = torch.randperm(len(x))
    held_out, training = order[:120].tolist(), order[120:].tolist()
    x_scale, y_scale = Scale(x[training].mean(0), x[training].std(0)), Scale(y[training].mean(), y[training].std())
    data = TensorDataset(x_scale.apply(x), y_scale.apply(y))
    train_loader = DataLoader(Subset(data, training), args.batch_size, shuffle=True)
    test_loader = DataLoader(Subset(data, held_out), 60)

    model = MeanVariance(x.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    result: dict[str, float] = {}
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for xb, yb in train_loader:
            mean, log_variance = model(xb)
            loss = gaussian_nll(mean, log_variance, yb.unsqueeze(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if (epoch + 1) % 2 == 0:
            result = evaluate(model, test_loader, y_scale, args.mc_passes)
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
            print(f"epoch {epoch + 1}: train nll {total / len(train_loader):.3f}; held out: {numbers}")
    torch.save({"model": model.state_dict(), "x": x_scale, "y": y_scale}, args.save_to)
    print("FINAL", ",".join(f"{name}={value:.4f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
