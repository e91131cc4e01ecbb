"""A pointer network after shirgur/PointerNet and keon/pointer-networks: it learns to sort numbers by pointing at them."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim

parser = argparse.ArgumentParser(description="Pytorch implementation of Pointer-Net")
parser.add_argument("--train_size", default=4800, type=int)
parser.add_argument("--batch_size", default=64, type=int)
parser.add_argument("--nof_epoch", default=4, type=int)
parser.add_argument("--lr", type=float, default=5e-3)
parser.add_argument("--nof_points", type=int, default=6)
parser.add_argument("--hiddens", type=int, default=48)
parser.add_argument("--seed", type=int, default=0)
params = parser.parse_args()
torch.manual_seed(params.seed)


def make_data(size, generator):
    x = torch.rand(size, params.nof_points, generator=generator)
    return x, x.argsort(dim=1)


class Attention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.W1 = nn.Linear(hidden_size, hidden_size, bias=False)
        self.W2 = nn.Linear(hidden_size, hidden_size, bias=False)
        self.vt = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, decoder_state, encoder_outputs, mask):
        u = self.vt(torch.tanh(self.W1(encoder_outputs) + self.W2(decoder_state).unsqueeze(1))).squeeze(-1)
        return F.log_softmax(u.masked_fill(mask, -1e9), dim=-1)


class PointerNet(nn.Module):
    def __init__(self, embedding_size, hidden_size):
        super().__init__()
        self.embedding = nn.Linear(1, embedding_size)
        self.encoder = nn.LSTM(embedding_size, hidden_size, batch_first=True)
        self.decoder = nn.LSTMCell(embedding_size, hidden_size)
        self.attn = Attention(hidden_size)
        self.decoder_input0 = nn.Parameter(torch.zeros(embedding_size))

    def forward(self, inputs, targets=None):
        batch_size, length = inputs.shape
        rows = torch.arange(batch_size)
        embedded = self.embedding(inputs.unsqueeze(-1))
        encoder_outputs, (h, c) = self.encoder(embedded)
        h, c = h[0], c[0]
        decoder_input = self.decoder_input0.expand(batch_size, -1)
        mask = torch.zeros(batch_size, length, dtype=torch.bool)
        outputs, pointers = [], []
        for t in range(length):
            h, c = self.decoder(decoder_input, (h, c))
            log_p = self.attn(h, encoder_outputs, mask)
            index = targets[:, t] if targets is not None else log_p.argmax(dim=1)
            mask = mask.scatter(1, index.unsqueeze(1), True)
            decoder_input = embedded[rows, index]
            outputs.append(log_p)
            pointers.append(log_p.argmax(dim=1))
        return torch.stack(outputs, dim=1), torch.stack(pointers, dim=1)


def main():
    generator = torch.Generator().manual_seed(11)
    train_x, train_y = make_data(params.train_size, generator)
    test_x, _ = make_data(500, generator)
    model = PointerNet(16, params.hiddens)
    model_optim = optim.Adam(model.parameters(), lr=params.lr)
    n_batches = params.train_size // params.batch_size
    for epoch in range(params.nof_epoch):
        model.train()
        batch_loss = []
        order = torch.randperm(params.train_size)
        for i in range(n_batches):
            chosen = order[i * params.batch_size : (i + 1) * params.batch_size]
            x, y = train_x[chosen], train_y[chosen]
            o, p = model(x, y)
            loss = F.nll_loss(o.reshape(-1, params.nof_points), y.reshape(-1))
            model_optim.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            model_optim.step()
            batch_loss.append(loss.item())
        for group in model_optim.param_groups:
            group["lr"] *= 0.8
        print(f"Epoch {epoch + 1} / {params.nof_epoch} loss {sum(batch_loss) / n_batches:.5f}")

    model.eval()
    with torch.no_grad():
        _, pointers = model(test_x)
    picked = test_x.gather(1, pointers)
    right = picked == test_x.sort(dim=1)[0]
    print(f"whole lists sorted: {right.all(dim=1).float().mean():.4f}")
    print(f"FINAL place_acc={right.float().mean():.4f}")


if __name__ == "__main__":
    main()
