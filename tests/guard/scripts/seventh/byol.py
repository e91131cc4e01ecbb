"""BYOL after lucidrains/byol-pytorch: two views of a digit, predictor, averaged target encoder; a linear probe on few labels."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)


def loss_fn(x, y):
    x = F.normalize(x, dim=-1, p=2)
    y = F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return new if old is None else old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
        old_weight, up_weight = ma_params.data, current_params.data
        ma_params.data = ema_updater.update_average(old_weight, up_weight)


def MLP(dim, projection_size, hidden_size):
    return nn.Sequential(
        nn.Linear(dim, hidden_size), nn.BatchNorm1d(hidden_size), nn.ReLU(), nn.Linear(hidden_size, projection_size)
    )


class RandomView(nn.Module):
    """Shift by up to one pixel, contrast, noise, an erased square."""

    def forward(self, x):
        x = F.pad(x, (1, 1, 1, 1))
        i, j = np.random.randint(0, 3, 2)
        x = x[:, :, i : i + 8, j : j + 8] * torch.empty(len(x), 1, 1, 1).uniform_(0.6, 1.4)
        x = x + 0.1 * torch.randn_like(x)
        i, j = np.random.randint(0, 6, 2)
        x[:, :, i : i + 3, j : j + 3] = 0
        return x


class BYOL(nn.Module):
    def __init__(self, net, hidden_dim, projection_size=32, moving_average_decay=0.95):
        super().__init__()
        self.augment1, self.augment2 = RandomView(), RandomView()
        self.online_encoder = nn.Sequential(net, MLP(hidden_dim, projection_size, 128))
        self.target_encoder = copy.deepcopy(self.online_encoder)
        for p in self.target_encoder.parameters():
            p.requires_grad = False
        self.target_ema_updater = EMA(moving_average_decay)
        self.online_predictor = MLP(projection_size, projection_size, 128)

    def update_moving_average(self):
        update_moving_average(self.target_ema_updater, self.target_encoder, self.online_encoder)

    def forward(self, x):
        image_one, image_two = self.augment1(x), self.augment2(x)
        online_pred_one = self.online_predictor(self.online_encoder(image_one))
        online_pred_two = self.online_predictor(self.online_encoder(image_two))
        with torch.no_grad():
            target_proj_one = self.target_encoder(image_one)
            target_proj_two = self.target_encoder(image_two)
        loss_one = loss_fn(online_pred_one, target_proj_two.detach())
        loss_two = loss_fn(online_pred_two, target_proj_one.detach())
        return (loss_one + loss_two).mean()


def linear_probe(net, train, test, per_class=8):
    net.eval()
    with torch.no_grad():
        features, test_features = net(train[0]).numpy(), net(test[0]).numpy()
    few = np.concatenate([np.where(train[1] == c)[0][:per_class] for c in range(10)])
    mean, std = features.mean(0), features.std(0) + 1e-6
    probe = LogisticRegression(max_iter=500, C=1.0).fit((features[few] - mean) / std, train[1][few])
    net.train()
    return probe.score((test_features - mean) / std, test[1])


digits = load_digits()
images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], digits.target
order = np.random.default_rng(4).permutation(len(labels))
train_set, test_set = ((images[part], labels[part]) for part in (order[:1200], order[1200:]))
encoder = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64),
)  # fmt: skip
learner = BYOL(encoder, hidden_dim=64)
opt = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=2e-3)
loader = DataLoader(TensorDataset(train_set[0]), batch_size=128, shuffle=True, drop_last=True)
print(f"probe before: {linear_probe(encoder, train_set, test_set):.4f}")
for epoch in range(16):
    for (batch,) in loader:
        loss = learner(batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
        learner.update_moving_average()
    if epoch % 4 == 3:
        print(f"epoch {epoch + 1} loss {loss.item():.4f} probe {linear_probe(encoder, train_set, test_set):.4f}")
print(f"FINAL probe_acc={linear_probe(encoder, train_set, test_set):.4f}")
