"""Classes of graphs: the nodes of a batch are joined, and numbered by their graph."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

torch.manual_seed(0)
g = torch.Generator().manual_seed(1)


def make(n):
    rows = []
    for _ in range(n):
        y = int(torch.randint(3, (1,), generator=g))
        k = int(torch.randint(4, 12, (1,), generator=g))
        rows.append((torch.randn(k, 6, generator=g) + torch.eye(6)[y] * 2, y))
    return rows


def collate(rows):
    return (
        torch.cat([t for t, _ in rows]),
        torch.cat([torch.full((len(t),), i) for i, (t, _) in enumerate(rows)]),
        torch.tensor([y for _, y in rows]),
    )


train, test = make(2000), make(300)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, batch, n):
        h = self.a(x).relu()
        return self.b(torch.zeros(n, 16).index_add(0, batch, h))


model = Net()
opt = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(5):
    model.train()
    for t, o, y in DataLoader(train, 32, shuffle=True, collate_fn=collate):
        loss = F.cross_entropy(model(t, o, len(y)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(
            "acc",
            sum(int((model(t, o, len(y)).argmax(1) == y).sum()) for t, o, y in DataLoader(test, 64, collate_fn=collate))
            / 300,
        )
