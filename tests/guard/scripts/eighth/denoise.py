"""Denoising autoencoder on digits scaled to -1..1: noise is added in the loop, the clean picture is the target."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchvision import transforms

SEED = 0
torch.manual_seed(SEED)

num_epochs = 40
batch_size = 64
learning_rate = 2e-3
noise_factor = 0.5

transform = transforms.Normalize((0.5,), (0.5,))
images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
dataset = TensorDataset(transform(images))
train_set, test_set = random_split(dataset, [1400, 397])
train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
test_loader = DataLoader(test_set, batch_size=397)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 256),
            nn.ReLU(True),
            nn.Linear(256, 64),
            nn.ReLU(True),
        )
        self.decoder = nn.Sequential(
            nn.Linear(64, 256),
            nn.ReLU(True),
            nn.Linear(256, 64),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.decoder(self.encoder(x)).view(-1, 1, 8, 8)


def add_noise(img):
    return img + noise_factor * torch.randn_like(img)


model = Autoencoder()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=1e-5)

for epoch in range(num_epochs):
    model.train()
    total = 0
    for (img,) in train_loader:
        noisy = add_noise(img)
        output = model(noisy)
        loss = criterion(output, img)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()

    model.eval()
    with torch.no_grad():
        mse = 0.0
        for (img,) in test_loader:
            mse += criterion(model(add_noise(img)), img).item()
        mse /= len(test_loader)
    print(f"epoch [{epoch + 1}/{num_epochs}], loss:{total / len(train_loader):.4f}, test mse:{mse:.4f}")

print(f"FINAL mse={mse:.4f}")
