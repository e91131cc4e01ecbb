"""Digits as nodes of a graph of nearest neighbours, 200 of them labelled: a two-layer GCN with edge lists, the whole graph in every step."""

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import nn
from torch.nn import functional as F

import trainworthy

SEED = 0
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
n = len(x)
coo = kneighbors_graph(digits.data, 6).tocoo()
edges = torch.tensor(list(zip(coo.row.tolist(), coo.col.tolist()))).T  # 2, E
edges = torch.cat([edges, edges.flip(0), torch.arange(n).expand(2, n)], dim=1).unique(dim=1)
order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
train_mask, val_mask = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
train_mask[order[:200]] = True
val_mask[order[200:]] = True
graph = {"x": x, "edges": edges, "y": y, "train_mask": train_mask}


class GraphConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.linear = nn.Linear(cin, cout)

    def forward(self, x, edges):
        source, target = edges
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target)))
        weight = (degree[source] * degree[target]).rsqrt()
        return torch.zeros(len(x), self.linear.out_features).index_add_(
            0, target, self.linear(x)[source] * weight[:, None]
        )


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GraphConv(64, 32), GraphConv(32, 10)

    def forward(self, x, edges):
        h = F.dropout(F.relu(self.first(x, edges)), 0.5, self.training)
        return self.second(h, edges)


def train(model, optimizer, graphs):
    model.train()
    for g in graphs:
        optimizer.zero_grad()
        logits = model(g["x"], g["edges"])
        loss = F.cross_entropy(logits[g["train_mask"]], g["y"][g["train_mask"]])
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model):
    model.eval()
    found = model(x, edges).argmax(1)
    return (found[val_mask] == y[val_mask]).float().mean().item()


def make_parts():
    model = GCN()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)


def make_script():
    model, optimizer = make_parts()
    return trainworthy.Loop(
        models=model,
        optimizers=optimizer,
        batches=[graph],
        run=lambda graphs: train(model, optimizer, graphs),
        evaluate=lambda: accuracy(model),
        expect=trainworthy.Expect(batch_dependence="nodes see their neighbours", sampling="one graph"),
    )


def main():
    torch.manual_seed(SEED)
    model, optimizer = make_parts()
    for epoch in range(150):
        train(model, optimizer, [graph])
        if epoch % 50 == 49:
            print(epoch + 1, accuracy(model))
    print(f"FINAL accuracy={accuracy(model):.4f}")


if __name__ == "__main__":
    main()
