"""Numbers to Roman numerals with nn.Transformer: teacher forcing in training, greedy decoding in the test."""

import math
import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD, BOS, EOS = 0, 1, 2
DIGITS = {c: i + 3 for i, c in enumerate("0123456789")}
LETTERS = {c: i + 3 for i, c in enumerate("IVXLCDM")}

random.seed(0)
torch.manual_seed(0)


def to_roman(n):
    out = ""
    for value, text in [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),
                        (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]:  # fmt: skip
        out += text * (n // value)
        n %= value
    return out


def encode(n):
    source = [DIGITS[c] for c in str(n)] + [EOS]
    target = [BOS] + [LETTERS[c] for c in to_roman(n)] + [EOS]
    return torch.tensor(source), torch.tensor(target)


def collate(pairs):
    sources, targets = zip(*pairs)
    return (
        pad_sequence(sources, batch_first=True, padding_value=PAD),
        pad_sequence(targets, batch_first=True, padding_value=PAD),
    )


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=256, dropout=0.05):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.pe[: x.size(1)]
        return self.dropout(x)


class Translator(nn.Module):
    def __init__(self, d_model=48):
        super().__init__()
        self.src_embed = nn.Embedding(3 + len(DIGITS), d_model, padding_idx=PAD)
        self.tgt_embed = nn.Embedding(3 + len(LETTERS), d_model, padding_idx=PAD)
        self.pos = PositionalEncoding(d_model)
        self.transformer = nn.Transformer(d_model, nhead=4, num_encoder_layers=1, num_decoder_layers=2,
                                          dim_feedforward=96, dropout=0.05, batch_first=True)  # fmt: skip
        self.generator = nn.Linear(d_model, 3 + len(LETTERS))

    def forward(self, src, tgt):
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).bool()
        out = self.transformer(
            self.pos(self.src_embed(src)),
            self.pos(self.tgt_embed(tgt)),
            tgt_mask=tgt_mask,
            src_key_padding_mask=src == PAD,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src == PAD,
        )
        return self.generator(out)

    @torch.no_grad()
    def translate(self, src, max_len=18):
        tgt = torch.full((len(src), 1), BOS)
        for _ in range(max_len):
            next_token = self(src, tgt)[:, -1].argmax(dim=-1, keepdim=True)
            tgt = torch.cat([tgt, next_token], dim=1)
        return tgt


def exact_match(model, loader):
    model.eval()
    right = total = 0
    for src, tgt in loader:
        for guess, truth in zip(model.translate(src).tolist(), tgt.tolist()):
            end = guess.index(EOS) + 1 if EOS in guess else len(guess)
            right += guess[:end] == [t for t in truth if t != PAD]
            total += 1
    return right / total


numbers = list(range(1, 4000))
random.shuffle(numbers)
train_pairs = [encode(n) for n in numbers[:3200]]
test_pairs = [encode(n) for n in numbers[3200:3600]]
train_loader = DataLoader(train_pairs, batch_size=64, shuffle=True, collate_fn=collate)
test_loader = DataLoader(test_pairs, batch_size=200, collate_fn=collate)

model = Translator()
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))

for epoch in range(11):
    model.train()
    total = 0.0
    for src, tgt in train_loader:
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        logits = model(src, tgt_in)
        loss = criterion(logits.reshape(-1, logits.size(-1)), tgt_out.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: loss {total / len(train_loader):.4f}")
print(f"FINAL exact_match={exact_match(model, test_loader):.4f}")
