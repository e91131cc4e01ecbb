"""SimCLR on digits: two random views, NT-Xent, projection head; the score is a nearest-neighbour classifier on the encoder's features."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import trainworthy

SEED = 0
TEMPERATURE = 0.2
digits = load_digits()
X = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
y = torch.tensor(digits.target)
order = torch.randperm(len(X), generator=torch.Generator().manual_seed(5))
train_rows, val_rows = order[:1400], order[1400:]


def augment(image):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    image = torch.roll(image, (dx, dy), (1, 2)) * (0.6 + 0.8 * torch.rand(1))
    return image + 0.1 * torch.randn_like(image)


class Views(Dataset):
    def __len__(self):
        return len(train_rows)

    def __getitem__(self, i):
        image = X[train_rows[i]]
        return augment(image), augment(image)


def make_encoder():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip


def nt_xent(a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    similarity = z @ z.T / TEMPERATURE
    similarity.fill_diagonal_(float("-inf"))
    n = len(a)
    positives = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(similarity, positives)


def train_epoch(encoder, head, optimizer, loader):
    encoder.train()
    head.train()
    for a, b in loader:
        loss = nt_xent(head(encoder(a)), head(encoder(b)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def knn_accuracy(encoder):
    encoder.eval()
    known, asked = F.normalize(encoder(X[train_rows]), dim=1), F.normalize(encoder(X[val_rows]), dim=1)
    labelled = known[:200], y[train_rows][:200]  # few labels
    nearest = (asked @ labelled[0].T).topk(3, dim=1).indices
    votes = labelled[1][nearest].mode(dim=1).values
    return (votes == y[val_rows]).float().mean().item()


def make_parts():
    encoder, head = make_encoder(), nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-3, weight_decay=1e-6)
    return encoder, head, optimizer


def make_loader():
    return DataLoader(Views(), batch_size=128, shuffle=True, drop_last=True)


def make_script():
    encoder, head, optimizer = make_parts()
    return trainworthy.Loop(
        models={"encoder": encoder, "head": head},
        optimizers=optimizer,
        batches=make_loader(),
        run=lambda batches: train_epoch(encoder, head, optimizer, batches),
        evaluate=lambda: knn_accuracy(encoder),
        expect=trainworthy.Expect(batch_dependence="NT-Xent: the other samples are the negatives"),
    )


def main():
    torch.manual_seed(SEED)
    encoder, head, optimizer = make_parts()
    loader = make_loader()
    print("untrained", knn_accuracy(encoder))
    for epoch in range(20):
        train_epoch(encoder, head, optimizer, loader)
    print(f"FINAL knn={knn_accuracy(encoder):.4f}")


if __name__ == "__main__":
    main()
