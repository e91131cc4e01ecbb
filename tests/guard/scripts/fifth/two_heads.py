"""Two tasks on one trunk, written in the shape of a LightningModule with a loop of its own: which digit, and how far it is turned."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, random_split


class TurnedDigits(Dataset):
    """Every digit is shown at one of four turns, drawn once per picture."""

    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        self.digit = torch.tensor(digits.target)
        self.turn = torch.randint(0, 4, (len(self.digit),), generator=torch.Generator().manual_seed(9))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        image = torch.rot90(self.images[idx], int(self.turn[idx]), dims=(1, 2))
        return image, {"digit": self.digit[idx], "turn": self.turn[idx]}


class LitTwoHeads(nn.Module):
    def __init__(self, width=16, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.trunk = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * width, 64),
            nn.ReLU(),
        )
        self.heads = nn.ModuleDict({"digit": nn.Linear(64, 10), "turn": nn.Linear(64, 4)})
        self.log_vars = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(())) for name in self.heads}
        )  # Kendall et al. 2018

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h) for name, head in self.heads.items()}

    def training_step(self, batch):
        x, targets = batch
        out = self(x)
        loss = 0.0
        for name in self.heads:
            ce = F.cross_entropy(out[name], targets[name])
            loss = loss + torch.exp(-self.log_vars[name]) * ce + 0.5 * self.log_vars[name]
        return loss

    def validation_step(self, batch):
        x, targets = batch
        out = self(x)
        return {name: (out[name].argmax(1) == targets[name]).float().sum() for name in self.heads}

    def configure_optimizers(self):
        groups = [
            {"params": self.trunk.parameters(), "weight_decay": 1e-2},
            {"params": [*self.heads.parameters(), *self.log_vars.parameters()], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)


class Fitter:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, train_loader, val_loader):
        optimizer, scheduler = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            module.train()
            for batch in train_loader:
                loss = module.training_step(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()
            print(f"epoch {epoch} loss {loss.item():.3f}", self.validate(module, val_loader))

    @torch.no_grad()
    def validate(self, module, loader):
        module.eval()
        sums = {}
        for batch in loader:
            for name, right in module.validation_step(batch).items():
                sums[name] = sums.get(name, 0.0) + right.item()
        return {f"val_{name}": round(value / len(loader.dataset), 4) for name, value in sums.items()}


if __name__ == "__main__":
    SEED = 0
    torch.manual_seed(SEED)
    train_set, val_set = random_split(TurnedDigits(), [1297, 500], generator=torch.Generator().manual_seed(21))
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=250)
    module, fitter = LitTwoHeads(), Fitter(max_epochs=4)
    fitter.fit(module, train_loader, val_loader)
    scores = fitter.validate(module, val_loader)
    print(f"FINAL mean_accuracy={sum(scores.values()) / 2:.4f}")
