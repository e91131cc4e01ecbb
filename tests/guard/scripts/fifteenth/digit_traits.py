"""Four traits of a digit at once (even, prime, with a loop, five or more): a small CNN in bf16 autocast, gradients accumulated over 2 batches."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainworthy

SEED = 0
ACCUM = 2
TRAITS = {
    "even": [0, 2, 4, 6, 8],
    "prime": [2, 3, 5, 7],
    "loop": [0, 6, 8, 9],
    "five or more": [5, 6, 7, 8, 9],
}

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
traits = torch.tensor([[float(d in members) for members in TRAITS.values()] for d in digits.target])
generator = torch.Generator().manual_seed(7)
order = torch.randperm(len(images), generator=generator)
train_ids, val_ids = order[:1400], order[1400:]
train_set = TensorDataset(images[train_ids], traits[train_ids])
val_set = TensorDataset(images[val_ids], traits[val_ids])


class TraitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(32 * 4, len(TRAITS))

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def compute_loss(model, batch):
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    return F.binary_cross_entropy_with_logits(logits.float(), y)


def train_epoch(model, optimizer, loader):
    model.train()
    optimizer.zero_grad()
    for i, batch in enumerate(loader):
        loss = compute_loss(model, batch) / ACCUM
        loss.backward()
        if (i + 1) % ACCUM == 0:
            optimizer.step()
            optimizer.zero_grad()


def exact_match(model, loader):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in loader:
            predicted = torch.sigmoid(model(x)) > 0.5
            right += (predicted == y.bool()).all(dim=1).sum().item()
            total += len(x)
    return right / total


def make_script():
    model = TraitNet()
    return trainworthy.Script(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True),
        train=DataLoader(train_set, batch_size=25, shuffle=True),
        val=DataLoader(val_set, batch_size=100),
        loss=compute_loss,
        metric=exact_match,
        train_loop=train_epoch,
        accumulate=ACCUM,
        floor=0.2,
    )


def main():
    torch.manual_seed(SEED)
    model = TraitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    train_loader = DataLoader(train_set, batch_size=25, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=100)
    for epoch in range(15):
        train_epoch(model, optimizer, train_loader)
    print(f"FINAL exact={exact_match(model, val_loader):.4f}")


if __name__ == "__main__":
    main()
