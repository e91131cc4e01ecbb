"""Dates as people write them to ISO dates: GRU encoder, decoder with attention, teacher forcing."""

import datetime
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 0
random.seed(SEED)
torch.manual_seed(SEED)

PAD, SOS, EOS = 0, 1, 2
CHARS = "0123456789abcdefghijklmnopqrstuvwxyz ,./-"
char2id = {c: i + 3 for i, c in enumerate(CHARS)}
VOCAB = len(CHARS) + 3
FORMATS = ["%d %B %Y", "%B %d, %Y", "%d.%m.%Y", "%m/%d/%Y", "%A, %d %b %Y", "%b %d %Y"]
HIDDEN, BATCH, STEPS = 64, 64, 360
teacher_forcing_ratio = 0.7


def random_pair():
    day = datetime.date(1950, 1, 1) + datetime.timedelta(days=random.randrange(36500))
    return day.strftime(random.choice(FORMATS)).lower(), day.isoformat()


def encode(texts):
    rows = [[char2id[c] for c in t] + [EOS] for t in texts]
    longest = max(map(len, rows))
    return torch.tensor([r + [PAD] * (longest - len(r)) for r in rows])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32, padding_idx=PAD)
        self.gru = nn.GRU(32, HIDDEN, batch_first=True)

    def forward(self, src):
        return self.gru(self.embedding(src))


class AttnDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 32, padding_idx=PAD)
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.gru = nn.GRU(32 + HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, VOCAB)

    def forward(self, token, hidden, encoder_outputs, mask):
        embedded = self.embedding(token).unsqueeze(1)
        scores = torch.bmm(encoder_outputs, self.query(hidden[-1]).unsqueeze(2)).squeeze(2)
        scores = scores.masked_fill(~mask, -1e9)
        weights = F.softmax(scores, dim=1)
        context = torch.bmm(weights.unsqueeze(1), encoder_outputs)
        output, hidden = self.gru(torch.cat([embedded, context], dim=2), hidden)
        return self.out(output.squeeze(1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        encoder_outputs, hidden = self.encoder(src)
        mask = src != PAD
        token = torch.full((len(src),), SOS)
        outputs = []
        for t in range(trg.size(1)):
            output, hidden = self.decoder(token, hidden, encoder_outputs, mask)
            outputs.append(output)
            teacher_force = random.random() < teacher_forcing_ratio
            token = trg[:, t] if teacher_force else output.argmax(1)
        return torch.stack(outputs, dim=1)


def evaluate(model, pairs):
    model.eval()
    src, trg = encode([a for a, _ in pairs]), encode([b for _, b in pairs])
    with torch.no_grad():
        guess = model(src, trg, 0).argmax(-1)
    return (guess == trg).all(1).float().mean().item(), (guess == trg).float().mean().item()


test_pairs = [random_pair() for _ in range(500)]
model = Seq2Seq(Encoder(), AttnDecoder())
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)

for step in range(1, STEPS + 1):
    model.train()
    pairs = [random_pair() for _ in range(BATCH)]
    src, trg = encode([a for a, _ in pairs]), encode([b for _, b in pairs])
    output = model(src, trg, teacher_forcing_ratio)
    loss = criterion(output.reshape(-1, VOCAB), trg.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 90 == 0:
        exact, chars = evaluate(model, test_pairs)
        print(f"step {step} | loss {loss.item():.3f} | exact {exact:.3f} | characters {chars:.3f}")

print(f"FINAL exact={exact:.4f}")
