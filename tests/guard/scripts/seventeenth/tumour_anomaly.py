"""Anomaly detection: an autoencoder sees benign samples only; the error of reconstruction marks the malignant ones."""

import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

torch.manual_seed(0)
data = load_breast_cancer()
x, malignant = data.data, 1 - data.target  # in the data set 0 is malignant

benign_train, benign_rest = train_test_split(x[malignant == 0], test_size=0.4, random_state=0)
benign_val, benign_test = train_test_split(benign_rest, test_size=0.5, random_state=0)
bad = x[malignant == 1]

scaler = StandardScaler().fit(benign_train)


def tensor(rows):
    return torch.tensor(scaler.transform(rows), dtype=torch.float32).clamp(-8, 8)


train, val = tensor(benign_train), tensor(benign_val)
test = torch.cat([tensor(benign_test), tensor(bad)])
labels = torch.cat([torch.zeros(len(benign_test)), torch.ones(len(bad))])


class Autoencoder(nn.Module):
    def __init__(self, n_features, bottleneck=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_features, 20), nn.Tanh(), nn.Linear(20, bottleneck))
        self.decoder = nn.Sequential(nn.Linear(bottleneck, 20), nn.Tanh(), nn.Linear(20, n_features))

    def forward(self, x):
        return self.decoder(self.encoder(x))


model = Autoencoder(x.shape[1])
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
criterion = nn.MSELoss()
best, best_state, waited = float("inf"), None, 0

for epoch in range(150):
    model.train()
    for batch in torch.randperm(len(train)).split(32):
        clean = train[batch]
        noisy = clean + 0.1 * torch.randn_like(clean)
        loss = criterion(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = criterion(model(val), val).item()
    if val_loss < best - 1e-4:
        best, waited = val_loss, 0
        best_state = {name: value.clone() for name, value in model.state_dict().items()}
    else:
        waited += 1
    if epoch % 10 == 0:
        print(f"epoch {epoch}: train {loss.item():.4f}, val {val_loss:.4f}")
    if waited >= 15:
        break

model.load_state_dict(best_state)
model.eval()
with torch.no_grad():
    errors = ((model(test) - test) ** 2).mean(dim=1)
    val_errors = ((model(val) - val) ** 2).mean(dim=1)
threshold = val_errors.quantile(0.95)
alarms = errors > threshold
recall = alarms[labels == 1].float().mean().item()
false_alarms = alarms[labels == 0].float().mean().item()
print(f"recall {recall:.3f}, false alarms {false_alarms:.3f}")
print(f"FINAL auroc={roc_auc_score(labels.numpy(), errors.numpy()):.4f}")
