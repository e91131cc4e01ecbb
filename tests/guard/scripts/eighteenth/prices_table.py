# Regression on a table: predict the price of a house (in thousands) from eight features.
import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 0
np.random.seed(SEED)
torch.manual_seed(SEED)


def make_houses(n=3000):
    """Sales of twenty years: prices rise."""
    rng = np.random.default_rng(7)
    year = np.sort(rng.uniform(2000, 2020, n))
    area = rng.gamma(6, 20, n) + 30
    rooms = np.clip(np.round(area / 28 + rng.normal(0, 0.7, n)), 1, 9)
    age = rng.uniform(0, 80, n)
    distance = rng.exponential(8, n)
    income = rng.normal(55, 14, n)
    lat, lon = rng.uniform(50.0, 50.6, n), rng.uniform(8.2, 9.0, n)
    location = np.exp(-((lat - 50.3) ** 2 + (lon - 8.6) ** 2) / 0.03)
    price = 1.6 * area * (1 + 0.8 * location) * np.exp(-distance / 40) + 1.1 * income + 9 * rooms
    price = (price - 0.4 * age) * (1 + 0.04 * (year - 2000)) + rng.normal(0, 12, n)
    features = np.stack([year, area, rooms, age, distance, income, lat, lon], axis=1)
    return features.astype(np.float32), price.astype(np.float32)


X, y = make_houses()
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=SEED)

x_scaler = StandardScaler().fit(X_train)
y_scaler = StandardScaler().fit(y_train.reshape(-1, 1))
X_train = x_scaler.transform(X_train)
X_test = x_scaler.transform(X_test)
y_train_scaled = y_scaler.transform(y_train.reshape(-1, 1)).squeeze(1)

train_ds = TensorDataset(torch.from_numpy(X_train), torch.from_numpy(y_train_scaled))
train_loader = DataLoader(train_ds, batch_size=64, shuffle=True)


class PriceNet(nn.Module):
    def __init__(self, n_features, hidden=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(-1)


model = PriceNet(X_train.shape[1])
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.3)


def predict(features):
    """Prices in thousands."""
    model.eval()
    with torch.no_grad():
        scaled = model(torch.from_numpy(features)).numpy()
    return y_scaler.inverse_transform(scaled.reshape(-1, 1)).ravel()


epochs = 40
for epoch in range(epochs):
    model.train()
    epoch_loss = 0.0
    for xb, yb in train_loader:
        pred = model(xb)
        loss = criterion(pred, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item() * xb.size(0)
    scheduler.step()
    if (epoch + 1) % 5 == 0:
        rmse = np.sqrt(np.mean((predict(X_test) - y_test) ** 2))
        print(f"Epoch {epoch + 1}/{epochs}, train loss {epoch_loss / len(train_ds):.4f}, test RMSE {rmse:.1f}")

predictions = predict(X_test)
r2 = 1 - np.sum((y_test - predictions) ** 2) / np.sum((y_test - y_test.mean()) ** 2)
print(f"FINAL r2={r2:.4f}")
