"""Attention and teacher forcing after PyTorch's translation tutorial: English words into pig latin."""

import os
import random
import re
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim

SOS, EOS, PAD = 1, 2, 0
letters = "abcdefghijklmnopqrstuvwxyz"
n_chars = len(letters) + 3
MAX_LENGTH = 12
hidden_size = 64
batch_size = 64
teacher_forcing_ratio = 0.5
random.seed(0)
torch.manual_seed(0)


def pig(word):
    i = next((k for k, c in enumerate(word) if c in "aeiou"), 0)
    return word[i:] + word[:i] + "ay"


def read_words():
    import pydoc_data.topics

    text = open(os.path.abspath(pydoc_data.topics.__file__), encoding="utf-8").read().lower()
    words = sorted(w for w in set(re.findall(r"[a-z]+", text)) if 3 <= len(w) <= 8)
    random.shuffle(words)
    return words


def tensor_of(word):
    ids = [letters.index(c) + 3 for c in word] + [EOS]
    return ids + [PAD] * (MAX_LENGTH - len(ids))


words = read_words()
pairs = [(tensor_of(w), tensor_of(pig(w))) for w in words]
train_pairs, test_pairs = pairs[:-200], pairs[-200:]


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size, padding_idx=PAD)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class BahdanauAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys, mask):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        scores = scores.masked_fill(mask.unsqueeze(1), -1e9)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, encoder_outputs, encoder_hidden, mask, target_tensor=None):
        decoder_input = torch.full((encoder_outputs.size(0), 1), SOS)
        decoder_hidden = encoder_hidden
        decoder_outputs = []
        for i in range(MAX_LENGTH):
            decoder_output, decoder_hidden = self.forward_step(decoder_input, decoder_hidden, encoder_outputs, mask)
            decoder_outputs.append(decoder_output)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)  # Teacher forcing
            else:
                decoder_input = decoder_output.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)

    def forward_step(self, input, hidden, encoder_outputs, mask):
        embedded = self.dropout(self.embedding(input))
        context, _ = self.attention(hidden.permute(1, 0, 2), encoder_outputs, mask)
        output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
        return self.out(output), hidden


def train_epoch(encoder, decoder, encoder_optimizer, decoder_optimizer, criterion):
    encoder.train()
    decoder.train()
    random.shuffle(train_pairs)
    total_loss, n = 0, 0
    for k in range(0, len(train_pairs) - batch_size + 1, batch_size):
        batch = train_pairs[k : k + batch_size]
        input_tensor = torch.tensor([p[0] for p in batch])
        target_tensor = torch.tensor([p[1] for p in batch])
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        forced = target_tensor if random.random() < teacher_forcing_ratio else None
        outputs = decoder(encoder_outputs, encoder_hidden, input_tensor == PAD, forced)
        loss = criterion(outputs.view(-1, outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        total_loss += loss.item()
        n += 1
    return total_loss / n


def evaluate(encoder, decoder):
    encoder.eval()
    decoder.eval()
    with torch.no_grad():
        x = torch.tensor([p[0] for p in test_pairs])
        y = torch.tensor([p[1] for p in test_pairs])
        outputs, hidden = encoder(x)
        guess = decoder(outputs, hidden, x == PAD).argmax(-1)
        right = 0
        for g, t in zip(guess.tolist(), y.tolist()):
            n = t.index(EOS) + 1
            right += g[:n] == t[:n]
    return right / len(test_pairs)


encoder = EncoderRNN(n_chars, hidden_size)
decoder = AttnDecoderRNN(hidden_size, n_chars)
encoder_optimizer = optim.Adam(encoder.parameters(), lr=0.004)
decoder_optimizer = optim.Adam(decoder.parameters(), lr=0.004)
criterion = nn.NLLLoss(ignore_index=PAD)
start = time.time()
for epoch in range(1, 13):
    loss = train_epoch(encoder, decoder, encoder_optimizer, decoder_optimizer, criterion)
    print(f"{time.time() - start:.0f}s ({epoch}) loss {loss:.4f} exact {evaluate(encoder, decoder):.3f}")
