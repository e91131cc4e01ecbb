"""Sequence to sequence: GRU encoder and decoder, teacher forcing, two optimisers as in the tutorial, no evaluation."""

import random

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0), random.seed(0)


class Reverse(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(2, 20, (6,), generator=g)
        return x, torch.cat([x.flip(0), torch.tensor([1])])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.dropout = nn.Embedding(20, 48), nn.GRU(48, 48, batch_first=True), nn.Dropout(0.1)

    def forward(self, x):
        return self.gru(self.dropout(self.embedding(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(20, 48), nn.GRU(48, 48, batch_first=True), nn.Linear(48, 20)

    def forward(self, hidden, target):
        token, outputs = torch.zeros(len(target), 1, dtype=torch.long), []
        for t in range(target.shape[1]):
            out, hidden = self.gru(torch.relu(self.embedding(token)), hidden)
            outputs.append(self.out(out))
            token = target[:, t : t + 1] if random.random() < 0.5 else outputs[-1].argmax(-1).detach()
        return torch.log_softmax(torch.cat(outputs, 1), -1)


encoder, decoder = Encoder(), Decoder()
encoder_optimizer, decoder_optimizer = optim.Adam(encoder.parameters(), 2e-3), optim.Adam(decoder.parameters(), 2e-3)
criterion = nn.NLLLoss()
loader = DataLoader(Reverse(), 64, shuffle=True)
for epoch in range(6):
    total = 0.0
    for source, target in loader:
        encoder_optimizer.zero_grad(), decoder_optimizer.zero_grad()
        _, hidden = encoder(source)
        loss = criterion(decoder(hidden, target).view(-1, 20), target.view(-1))
        loss.backward()
        encoder_optimizer.step(), decoder_optimizer.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / len(loader):.4f}")
