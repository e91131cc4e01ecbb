"""A BiLSTM tagger after the sequence-labelling tutorials: sorted and packed sentences, padding tags ignored, accuracy of tags."""

import random

import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

SEED = 0
random.seed(SEED)
torch.manual_seed(SEED)
DET, ADJ = ["the", "a", "every"], ["red", "small", "old", "light", "round"]
NOUN, VERB = ["dog", "light", "house", "run", "walk", "cat"], ["sees", "run", "walk", "likes", "light"]
TAGS = ["DET", "ADJ", "NOUN", "VERB"]


def sentence(rng):
    def phrase():
        return [(rng.choice(DET), 0), *((rng.choice(ADJ), 1) for _ in range(rng.randint(0, 3))), (rng.choice(NOUN), 2)]

    return phrase() + [(rng.choice(VERB), 3)] + (phrase() if rng.random() < 0.7 else [])


class Sentences(Dataset):
    def __init__(self, n, seed):
        rng = random.Random(seed)
        self.rows = [sentence(rng) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, tags = zip(*self.rows[i])
        return torch.tensor([word_to_ix[w] for w in words]), torch.tensor(tags)


word_to_ix = {w: i + 1 for i, w in enumerate(sorted({*DET, *ADJ, *NOUN, *VERB}))}


def collate_fn(batch):
    words, tags = zip(*batch)
    lengths = torch.tensor([len(w) for w in words])
    lengths, order = lengths.sort(descending=True)
    words = pad_sequence([words[i] for i in order], batch_first=True)
    tags = pad_sequence([tags[i] for i in order], batch_first=True, padding_value=-1)
    return words, lengths, tags


class LSTMTagger(nn.Module):
    def __init__(self, embedding_dim, hidden_dim, vocab_size, tagset_size):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_dim, padding_idx=0)
        self.lstm = nn.LSTM(embedding_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.hidden2tag = nn.Linear(2 * hidden_dim, tagset_size)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.word_embeddings(words), lengths, batch_first=True)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.hidden2tag(self.dropout(out))


train_iter = DataLoader(Sentences(800, 1), batch_size=20, shuffle=True, collate_fn=collate_fn)
valid_iter = DataLoader(Sentences(200, 2), batch_size=50, collate_fn=collate_fn)
model = LSTMTagger(12, 16, len(word_to_ix) + 1, len(TAGS))
criterion = nn.CrossEntropyLoss(ignore_index=-1)
optimizer = optim.SGD(model.parameters(), lr=0.5)


def evaluate(iterator):
    model.eval()
    right = total = 0
    with torch.no_grad():
        for words, lengths, tags in iterator:
            predictions = model(words, lengths).argmax(dim=2)
            mask = tags != -1
            right += (predictions[mask] == tags[mask]).sum().item()
            total += mask.sum().item()
    return right / total


for epoch in range(6):
    model.train()
    epoch_loss = 0
    for words, lengths, tags in train_iter:
        optimizer.zero_grad()
        predictions = model(words, lengths)
        loss = criterion(predictions.view(-1, predictions.shape[-1]), tags.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        epoch_loss += loss.item()
    print(
        f"Epoch: {epoch + 1:02} | Train Loss: {epoch_loss / len(train_iter):.3f} | Val. Acc: {evaluate(valid_iter) * 100:.2f}%"
    )
print(f"FINAL acc={evaluate(valid_iter):.4f}")
