"""An EmbeddingBag over texts that are joined into one row of tokens, with the places where they begin and end."""

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
        t = torch.where(
            torch.rand(k, generator=g) < 0.5,
            torch.randint(20, (k,), generator=g) + 20 * y,
            torch.randint(60, (k,), generator=g),
        )
        rows.append((t, y))
    return rows


def collate(rows):
    sizes = [0] + [len(t) for t, _ in rows]
    return torch.cat([t for t, _ in rows]), torch.tensor(sizes).cumsum(0), torch.tensor([y for _, y in rows])


train, test = make(2000), make(300)
bag, head = nn.EmbeddingBag(60, 16, include_last_offset=True), nn.Linear(16, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = bag, head

    def forward(self, t, o):
        return self.head(self.bag(t, o))


model = Net()
opt = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(5):
    model.train()
    for t, o, y in DataLoader(train, 32, shuffle=True, collate_fn=collate):
        loss = F.cross_entropy(model(t, o), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    with torch.no_grad():
        print(
            "acc",
            sum(int((model(t, o).argmax(1) == y).sum()) for t, o, y in DataLoader(test, 64, collate_fn=collate)) / 300,
        )
