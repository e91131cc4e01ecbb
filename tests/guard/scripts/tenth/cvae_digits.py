import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data as data
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

# Conditional VAE on the small digits. Score: does a k-NN that never saw the VAE read the digit that was asked for,
# and does it look like one (distance to the nearest real digit)?

seed = 0
torch.manual_seed(seed)
np.random.seed(seed)

LATENT, HIDDEN, BATCH, EPOCHS, WARMUP_STEPS = 6, 128, 64, 40, 300
SIGMA = 0.15  # noise of a pixel

X, labels = load_digits(return_X_y=True)
perm = np.random.permutation(len(X))
X, labels = X[perm].astype(np.float32) / 16, labels[perm]
X_train, X_test, y_train, y_test = X[:1300], X[1300:], labels[:1300], labels[1300:]
train_loader = data.DataLoader(
    data.TensorDataset(torch.tensor(X_train), torch.tensor(y_train)), batch_size=BATCH, shuffle=True, drop_last=True
)


def one_hot(y):
    return F.one_hot(y, 10).float()


class CVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64 + 10, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
        self.fc_mu = nn.Linear(HIDDEN, LATENT)
        self.fc_logvar = nn.Linear(HIDDEN, LATENT)
        self.dec = nn.Sequential(
            nn.Linear(LATENT + 10, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 64)
        )

    def encode(self, x, c):
        h = self.enc(torch.cat([x, c], dim=1))
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z, c):
        return torch.sigmoid(self.dec(torch.cat([z, c], dim=1)))

    def forward(self, x, c):
        mu, logvar = self.encode(x, c)
        return self.decode(self.reparameterize(mu, logvar), c), mu, logvar


def loss_function(recon_x, x, mu, logvar, beta):
    RECON = F.mse_loss(recon_x, x, reduction="sum") / x.size(0) / (2 * SIGMA**2)
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp()) / x.size(0)
    return RECON + beta * KLD, RECON, KLD


@torch.no_grad()
def generate(model, digits):
    model.eval()
    z = torch.randn(len(digits), LATENT)
    return model.decode(z, one_hot(torch.as_tensor(digits)))


@torch.no_grad()
def elbo(model, x, y):
    model.eval()
    c = one_hot(torch.tensor(y))
    x = torch.tensor(x)
    total = 0
    for _ in range(10):
        recon, mu, logvar = model(x, c)
        total += loss_function(recon, x, mu, logvar, 1.0)[0].item()
    return total / 10


def main():
    model = CVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    global_step = 0
    for epoch in range(EPOCHS):
        model.train()
        sums = np.zeros(3)
        for x, y in train_loader:
            beta = min(1.0, global_step / WARMUP_STEPS)
            c = one_hot(y)
            recon, mu, logvar = model(x, c)
            losses = loss_function(recon, x, mu, logvar, beta)
            optimizer.zero_grad()
            losses[0].backward()
            optimizer.step()
            global_step += 1
            sums += [loss.item() for loss in losses]
        if epoch % 8 == 7:
            total, mse, kld = sums / len(train_loader)
            print(
                f"epoch {epoch + 1}: loss {total:.2f} recon {mse:.2f} kld {kld:.2f}  -elbo {elbo(model, X_test, y_test):.2f}"
            )
    asked = np.arange(1000) % 10
    made = generate(model, asked).numpy()
    knn = KNeighborsClassifier(5).fit(X_test, y_test)
    print("digits read as asked:", (knn.predict(made) == asked).mean())
    print("distance to the nearest real digit:", knn.kneighbors(made, 1)[0].mean().round(4))
    print(f"FINAL nelbo={elbo(model, X_test, y_test):.4f}")
    return model


if __name__ == "__main__":
    main()
