"""Is it an eight? One sample in twenty is, a WeightedRandomSampler draws both classes equally often; F1 and average precision on the test set."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, f1_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

SEED = 0
torch.manual_seed(SEED)
np.random.seed(SEED)

BATCH_SIZE = 64
EPOCHS = 15

X, target = load_digits(return_X_y=True)
y = (target == 8).astype(np.int64)
rare = np.flatnonzero(y == 1)
keep = np.concatenate([np.flatnonzero(y == 0), rare[: len(rare) // 2]])
X, y = X[keep], y[keep]
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.4, stratify=y, random_state=SEED)
scaler = StandardScaler()
X_train = scaler.fit_transform(X_train)
X_test = scaler.transform(X_test)

class_sample_count = np.bincount(y_train)
weight = 1.0 / class_sample_count
samples_weight = torch.from_numpy(weight[y_train])
sampler = WeightedRandomSampler(samples_weight, len(y_train), replacement=True)

train_dataset = TensorDataset(torch.tensor(X_train).float(), torch.tensor(y_train).float())
test_dataset = TensorDataset(torch.tensor(X_test).float(), torch.tensor(y_test).float())
train_loader = DataLoader(train_dataset, batch_size=BATCH_SIZE, sampler=sampler)
test_loader = DataLoader(test_dataset, batch_size=BATCH_SIZE, shuffle=False)


class BinaryClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_1 = nn.Linear(64, 64)
        self.layer_2 = nn.Linear(64, 64)
        self.layer_out = nn.Linear(64, 1)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(p=0.2)
        self.batchnorm1 = nn.BatchNorm1d(64)
        self.batchnorm2 = nn.BatchNorm1d(64)

    def forward(self, inputs):
        x = self.batchnorm1(self.relu(self.layer_1(inputs)))
        x = self.batchnorm2(self.relu(self.layer_2(x)))
        x = self.dropout(x)
        return self.layer_out(x)


model = BinaryClassification()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def evaluate():
    y_prob = []
    model.eval()
    with torch.no_grad():
        for X_batch, _ in test_loader:
            y_prob.append(torch.sigmoid(model(X_batch)).squeeze(1))
    y_prob = torch.cat(y_prob).numpy()
    return f1_score(y_test, y_prob > 0.5), average_precision_score(y_test, y_prob)


for e in range(1, EPOCHS + 1):
    model.train()
    epoch_loss = 0
    for X_batch, y_batch in train_loader:
        optimizer.zero_grad()
        y_pred = model(X_batch)
        loss = criterion(y_pred, y_batch.unsqueeze(1))
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
    f1, ap = evaluate()
    print(f"Epoch {e:03}: | Loss: {epoch_loss / len(train_loader):.5f} | F1: {f1:.3f} | AP: {ap:.3f}")

print(f"FINAL f1={f1:.4f}")
