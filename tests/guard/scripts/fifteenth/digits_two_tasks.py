"""Which digit, and where its ink is (centre of mass): two heads on one CNN, the losses weighted by learnt uncertainties, cosine schedule."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
EPOCHS = 12
CANVAS = 14
data = load_digits()


class Placed(Dataset):
    """Digits at a random place of a larger canvas; the places of the validation are fixed."""

    def __init__(self, rows, train):
        self.images = torch.tensor(data.images[rows] / 16, dtype=torch.float32)
        self.labels = torch.tensor(data.target[rows])
        self.places = None if train else torch.randint(0, CANVAS - 7, (len(self.images), 2),
                                                       generator=torch.Generator().manual_seed(1))  # fmt: skip

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        r, c = (torch.randint(0, CANVAS - 7, (2,)) if self.places is None else self.places[i]).tolist()
        canvas = torch.zeros(1, CANVAS, CANVAS)
        canvas[0, r : r + 8, c : c + 8] = self.images[i]
        grid = torch.arange(CANVAS, dtype=torch.float32) / (CANVAS - 1)
        ink = canvas[0] / canvas.sum()
        centre = torch.stack([(ink.sum(1) * grid).sum(), (ink.sum(0) * grid).sum()])
        return {"image": canvas, "label": self.labels[i], "centre": centre}


train_set, val_set = Placed(slice(0, 1400), True), Placed(slice(1400, None), False)


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classify = nn.Sequential(nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10))
        self.locate = nn.Linear(288, 2)
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, image):
        h = self.features(image)
        return self.classify(h), self.locate(h)


def loss_of(model, batch):
    logits, centre = model(batch["image"])
    losses = torch.stack([F.cross_entropy(logits, batch["label"]), F.mse_loss(centre, batch["centre"])])
    return (torch.exp(-model.log_var) * losses + 0.5 * model.log_var).sum()


def train_epoch(model, optimizer, loader):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


@torch.no_grad()
def score(model, loader):
    """Mean of the accuracy and of R2 of the centre."""
    model.eval()
    right, predicted, wanted = 0, [], []
    for batch in loader:
        logits, centre = model(batch["image"])
        right += (logits.argmax(1) == batch["label"]).sum().item()
        predicted.append(centre)
        wanted.append(batch["centre"])
    predicted, wanted = torch.cat(predicted), torch.cat(wanted)
    r2 = 1 - (predicted - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum()
    return (right / len(loader.dataset) + r2.item()) / 2


def make_parts():
    model = TwoTasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

    def epoch(model, optimizer, loader):
        train_epoch(model, optimizer, loader)
        scheduler.step()

    return model, optimizer, epoch


def make_script():
    model, optimizer, epoch = make_parts()
    return trainworthy.Script(
        model=model,
        optimizer=optimizer,
        train=train_set,
        val=val_set,
        target="label",
        classes=10,
        loss=loss_of,
        metric=score,
        floor=0.05,
        train_loop=epoch,
    )


def main():
    torch.manual_seed(SEED)
    model, optimizer, epoch = make_parts()
    train_loader, val_loader = DataLoader(train_set, 32, shuffle=True), DataLoader(val_set, 128)
    for i in range(EPOCHS):
        epoch(model, optimizer, train_loader)
        if i % 3 == 2:
            print(i + 1, score(model, val_loader))
    print(f"FINAL score={score(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
