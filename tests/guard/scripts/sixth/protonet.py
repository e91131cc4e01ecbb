"""Prototypical networks after orobix and jakesnell: episodes by a batch sampler, distances to class means, new classes at test."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)


class PrototypicalBatchSampler:
    def __init__(self, labels, classes_per_it, num_samples, iterations):
        self.labels, self.classes_per_it, self.sample_per_class, self.iterations = (
            labels,
            classes_per_it,
            num_samples,
            iterations,
        )
        self.classes = torch.unique(labels)

    def __iter__(self):
        for _ in range(self.iterations):
            batch = []
            for c in self.classes[torch.randperm(len(self.classes))[: self.classes_per_it]]:
                where = torch.nonzero(self.labels == c).flatten()
                batch.append(where[torch.randperm(len(where))[: self.sample_per_class]])
            batch = torch.stack(batch).reshape(-1)
            yield batch[torch.randperm(len(batch))]

    def __len__(self):
        return self.iterations


def euclidean_dist(x, y):
    n, m, d = x.size(0), y.size(0), x.size(1)
    x, y = x.unsqueeze(1).expand(n, m, d), y.unsqueeze(0).expand(n, m, d)
    return torch.pow(x - y, 2).sum(2)


def prototypical_loss(input, target, n_support):
    classes = torch.unique(target)
    n_query = target.eq(classes[0].item()).sum().item() - n_support
    support_idxs = [target.eq(c).nonzero()[:n_support].squeeze(1) for c in classes]
    prototypes = torch.stack([input[idx_list].mean(0) for idx_list in support_idxs])
    query_idxs = torch.stack([target.eq(c).nonzero()[n_support:] for c in classes]).view(-1)
    dists = euclidean_dist(input[query_idxs], prototypes)
    log_p_y = F.log_softmax(-dists, dim=1).view(len(classes), n_query, -1)
    target_inds = torch.arange(0, len(classes)).view(len(classes), 1, 1).expand(len(classes), n_query, 1).long()
    loss_val = -log_p_y.gather(2, target_inds).squeeze().view(-1).mean()
    _, y_hat = log_p_y.max(2)
    acc_val = y_hat.eq(target_inds.squeeze(2)).float().mean()
    return loss_val, acc_val


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2))


class ProtoNet(nn.Module):
    def __init__(self, hid=12, z=24):
        super().__init__()
        self.encoder = nn.Sequential(conv_block(1, hid), conv_block(hid, z))

    def forward(self, x):
        return self.encoder(x).flatten(1)


x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
tr, va, te = y < 5, (y == 5) | (y == 6), y > 6
sets = {k: (TensorDataset(x[m], y[m]), y[m]) for k, m in {"train": tr, "val": va, "test": te}.items()}
shapes = {"train": (5, 10, 40), "val": (2, 10, 20), "test": (3, 10, 60)}
loaders = {k: DataLoader(d, batch_sampler=PrototypicalBatchSampler(y_of, *shapes[k])) for k, (d, y_of) in sets.items()}
model = ProtoNet()
optim = torch.optim.Adam(params=model.parameters(), lr=1e-3)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer=optim, gamma=0.5, step_size=4)
best_acc = 0
for epoch in range(8):
    model.train()
    train_acc = []
    for xb, yb in loaders["train"]:
        optim.zero_grad()
        loss, acc = prototypical_loss(model(xb), target=yb, n_support=5)
        loss.backward()
        optim.step()
        train_acc.append(acc.item())
    lr_scheduler.step()
    model.eval()
    with torch.no_grad():
        val_acc = [prototypical_loss(model(xb), yb, 5)[1].item() for xb, yb in loaders["val"]]
    print(f"Epoch {epoch}: train acc {np.mean(train_acc):.3f}, val acc {np.mean(val_acc):.3f}")
    if np.mean(val_acc) >= best_acc:
        best_acc = np.mean(val_acc)
        torch.save(model.state_dict(), "best_model.pth")
model.load_state_dict(torch.load("best_model.pth"))
model.eval()
with torch.no_grad():
    test_acc = [prototypical_loss(model(xb), yb, 5)[1].item() for xb, yb in loaders["test"]]
print(f"FINAL test_acc={np.mean(test_acc):.4f}")
