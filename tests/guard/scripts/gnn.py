"""A graph network on one full batch with train and test masks: no DataLoader, an evaluation after every step."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
raw = load_digits()
x, y = torch.tensor(raw.data, dtype=torch.float32)[:900] / 16, torch.tensor(raw.target)[:900]
near = torch.cdist(x, x).topk(6, largest=False).indices
adjacency = torch.zeros(900, 900).scatter_(1, near, 1 / 6)
train_mask = torch.rand(900) < 0.3


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x, a):
        x = F.dropout(F.relu(a @ self.lin1(x)), p=0.5, training=self.training)
        return F.log_softmax(a @ self.lin2(x), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(1, 101):
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(x, adjacency)[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        pred = model(x, adjacency).argmax(1)
        acc = (pred[~train_mask] == y[~train_mask]).float().mean().item()
    if epoch % 10 == 0:
        print(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Test: {acc:.4f}")
