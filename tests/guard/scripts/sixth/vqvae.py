"""VQ-VAE after zalandoresearch/pytorch-vq-vae: a codebook, commitment loss, straight-through gradient, reconstruction."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
num_embeddings, embedding_dim, commitment_cost, epochs = 48, 8, 0.25, 16


class VectorQuantizer(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, commitment_cost):
        super().__init__()
        self._embedding_dim, self._num_embeddings = embedding_dim, num_embeddings
        self._embedding = nn.Embedding(num_embeddings, embedding_dim)
        self._embedding.weight.data.uniform_(-1 / num_embeddings, 1 / num_embeddings)
        self._commitment_cost = commitment_cost

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        input_shape = inputs.shape
        flat_input = inputs.view(-1, self._embedding_dim)
        distances = (
            torch.sum(flat_input**2, dim=1, keepdim=True)
            + torch.sum(self._embedding.weight**2, dim=1)
            - 2 * torch.matmul(flat_input, self._embedding.weight.t())
        )
        encoding_indices = torch.argmin(distances, dim=1).unsqueeze(1)
        encodings = torch.zeros(encoding_indices.shape[0], self._num_embeddings)
        encodings.scatter_(1, encoding_indices, 1)
        quantized = torch.matmul(encodings, self._embedding.weight).view(input_shape)
        e_latent_loss = F.mse_loss(quantized.detach(), inputs)
        q_latent_loss = F.mse_loss(quantized, inputs.detach())
        loss = q_latent_loss + self._commitment_cost * e_latent_loss
        quantized = inputs + (quantized - inputs).detach()
        avg_probs = torch.mean(encodings, dim=0)
        perplexity = torch.exp(-torch.sum(avg_probs * torch.log(avg_probs + 1e-10)))
        return loss, quantized.permute(0, 3, 1, 2).contiguous(), perplexity, encodings


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self._encoder = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 1, 1), nn.ReLU())
        self._pre_vq_conv = nn.Conv2d(24, embedding_dim, kernel_size=1, stride=1)
        self._vq_vae = VectorQuantizer(num_embeddings, embedding_dim, commitment_cost)
        self._decoder = nn.Sequential(
            nn.Conv2d(embedding_dim, 24, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(24, 1, 4, 2, 1)
        )

    def forward(self, x):
        z = self._pre_vq_conv(self._encoder(x))
        loss, quantized, perplexity, _ = self._vq_vae(z)
        return loss, self._decoder(quantized), perplexity


x, y = load_digits(return_X_y=True)
x = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8) - 0.5
data_variance = x[:1400].var()
training_loader = DataLoader(TensorDataset(x[:1400]), batch_size=50, shuffle=True)
validation_loader = DataLoader(TensorDataset(x[1400:]), batch_size=100, shuffle=True)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, amsgrad=False)
for epoch in range(epochs):
    model.train()
    for (data,) in training_loader:
        optimizer.zero_grad()
        vq_loss, data_recon, perplexity = model(data)
        recon_error = F.mse_loss(data_recon, data) / data_variance
        loss = recon_error + vq_loss
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val = sum(F.mse_loss(model(d)[1], d, reduction="sum").item() for (d,) in validation_loader)
    print(
        f"{epoch} recon_error: {recon_error.item():.3f} perplexity: {perplexity.item():.3f} val: {val / x[1400:].numel():.5f}"
    )
    torch.save(model.state_dict(), "vqvae.pt")
print(f"FINAL val_mse={val / x[1400:].numel():.5f}")
