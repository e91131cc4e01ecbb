"""MoCo after facebookresearch/moco: a queue of keys, a momentum encoder, two crops of each picture, a kNN monitor."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)


class TwoCropsTransform:
    def __init__(self, base_transform):
        self.base_transform = base_transform

    def __call__(self, x):
        return [self.base_transform(x), self.base_transform(x)]


def crop(x):
    x = F.pad(x, (1, 1, 1, 1))
    i, j = torch.randint(0, 3, (2,)).tolist()
    x = x[:, i : i + 8, j : j + 8]
    return x * (0.8 + 0.4 * torch.rand(1)) + 0.1 * torch.randn_like(x)


class Digits(Dataset):
    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i]), self.labels[i]


def encoder(dim):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, dim))


class MoCo(nn.Module):
    def __init__(self, dim=24, K=512, m=0.99, T=0.2):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = encoder(dim), encoder(dim)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        batch_size, ptr = keys.shape[0], int(self.queue_ptr)
        self.queue[:, ptr : ptr + batch_size] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            idx_shuffle = torch.randperm(len(im_k))
            k = F.normalize(self.encoder_k(im_k[idx_shuffle]), dim=1)
            k = k[torch.argsort(idx_shuffle)]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


@torch.no_grad()
def knn_accuracy(net, memory, test, k=10):
    net.eval()
    bank, targets = zip(*[(F.normalize(net(x), dim=1), y) for x, y in memory])
    bank, targets = torch.cat(bank), torch.cat(targets)
    right = total = 0
    for x, y in test:
        votes = targets[(F.normalize(net(x), dim=1) @ bank.T).topk(k, dim=1).indices]
        right += (votes.mode(dim=1).values == y).sum().item()
        total += len(y)
    net.train()
    return right / total


x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
train_loader = DataLoader(
    Digits(x[:1408], y[:1408], TwoCropsTransform(crop)), batch_size=64, shuffle=True, drop_last=True
)
memory_loader = DataLoader(TensorDataset(x[:1408], y[:1408]), batch_size=256)
test_loader = DataLoader(TensorDataset(x[1408:], y[1408:]), batch_size=256)
model = MoCo()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
for epoch in range(20):
    model.train()
    total = 0.0
    for images, _ in train_loader:
        output, target = model(im_q=images[0], im_k=images[1])
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    print(
        f"epoch {epoch} loss {total / len(train_loader):.3f} knn {knn_accuracy(model.encoder_q, memory_loader, test_loader):.3f}"
    )
print(f"FINAL knn={knn_accuracy(model.encoder_q, memory_loader, test_loader):.4f}")
