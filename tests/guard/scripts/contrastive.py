"""SimCLR's shape: two views of every picture, NT-Xent over the batch, then a linear probe on frozen features."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
raw = load_digits()
pictures = torch.tensor(raw.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
labels = torch.tensor(raw.target)


class TwoViews(Dataset):
    def __len__(self):
        return 1400

    def view(self, x):
        a, b = torch.randint(0, 3, (2,)).tolist()
        return F.pad(x, (1, 1, 1, 1))[:, a : a + 8, b : b + 8] + 0.05 * torch.randn(1, 8, 8)

    def __getitem__(self, i):
        return self.view(pictures[i]), self.view(pictures[i])


encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64))
projector = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))


def nt_xent(a, b, t=0.5):
    z = F.normalize(torch.cat([a, b]), dim=1)
    sim = (z @ z.t() / t).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    n = len(a)
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


loader = DataLoader(TwoViews(), batch_size=128, shuffle=True, drop_last=True)
optimizer = torch.optim.Adam([*encoder.parameters(), *projector.parameters()], lr=1e-3)
for epoch in range(6):
    encoder.train()
    for a, b in loader:
        loss = nt_xent(projector(encoder(a)), projector(encoder(b)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    encoder.eval()
    with torch.no_grad():
        features = F.normalize(encoder(pictures), dim=1)
        near = (features[1400:] @ features[:1400].t()).argmax(1)
        acc = (labels[:1400][near] == labels[1400:]).float().mean().item()
    print(f"epoch {epoch} loss {loss.item():.3f} knn accuracy {acc:.3f}")
encoder.requires_grad_(False)
probe = nn.Linear(64, 10)
opt = torch.optim.Adam(probe.parameters(), lr=1e-2)
for _ in range(20):
    loss = F.cross_entropy(probe(encoder(pictures[:1400])), labels[:1400])
    opt.zero_grad()
    loss.backward()
    opt.step()
