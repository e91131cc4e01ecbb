"""Sentiment of short reviews: own vocabulary, padding in collate, packed bidirectional LSTM, as tutorials on IMDB have it."""

import random
from collections import Counter

import torch
import torch.nn as nn
import torch.optim as optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

SEED = 1234
BATCH_SIZE = 32
EMBEDDING_DIM = 32
HIDDEN_DIM = 32
DROPOUT = 0.3
N_EPOCHS = 6
PAD, UNK = "<pad>", "<unk>"

GOOD = "great wonderful brilliant moving funny superb delightful clever charming gripping".split()
BAD = "awful boring terrible dull weak tedious clumsy annoying pointless flat".split()
THINGS = "plot acting cast music ending dialogue pacing script camera story humour editing".split()
FILL = (
    "I watched it on a rainy evening with friends . the director had made two films before . "
    "it runs for almost two hours . we had read about it in the paper . tickets were cheap that day . "
    "the cinema was half empty . my brother wanted to see it ."
).split(" . ")


def write_review(rng):
    """A review of a few sentences. Opinions may be negated ; the majority of them is the label."""
    label = rng.random() < 0.5
    n = rng.choice([1, 3, 5])
    opinions = [label] * (n // 2 + 1)
    opinions += [rng.random() < 0.5 for _ in range(n - len(opinions))]
    sentences = []
    for positive in opinions:
        negated = rng.random() < 0.3
        word = rng.choice(GOOD if positive != negated else BAD)
        verb = rng.choice(["was not", "is not", "was never"]) if negated else rng.choice(["was", "is", "felt really"])
        sentences.append(f"the {rng.choice(THINGS)} {verb} {word}")
    sentences += rng.sample(FILL, rng.randint(0, 4))
    rng.shuffle(sentences)
    return " . ".join(sentences) + " .", int(label)


class ReviewDataset(Dataset):
    def __init__(self, reviews, vocab):
        self.reviews, self.vocab = reviews, vocab

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, i):
        text, label = self.reviews[i]
        ids = [self.vocab.get(token, self.vocab[UNK]) for token in tokenize(text)]
        return torch.tensor(ids), float(label)


def tokenize(text):
    return text.lower().split()


def build_vocab(reviews, max_size=2000):
    counter = Counter(token for text, _ in reviews for token in tokenize(text))
    tokens = [PAD, UNK] + [token for token, _ in counter.most_common(max_size)]
    return {token: i for i, token in enumerate(tokens)}


def collate(batch):
    texts, labels = zip(*batch)
    lengths = torch.tensor([len(t) for t in texts])
    padded = pad_sequence(texts, batch_first=True, padding_value=0)
    return padded, lengths, torch.tensor(labels)


class RNN(nn.Module):
    def __init__(self, vocab_size, embedding_dim, hidden_dim, dropout, pad_idx):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_dim, padding_idx=pad_idx)
        self.rnn = nn.LSTM(embedding_dim, hidden_dim, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(hidden_dim * 2, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, text, text_lengths):
        embedded = self.dropout(self.embedding(text))
        packed = pack_padded_sequence(embedded, text_lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        hidden = self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1))
        return self.fc(hidden)


def binary_accuracy(preds, y):
    rounded_preds = torch.round(torch.sigmoid(preds))
    return (rounded_preds == y).float().mean().item()


def train(model, iterator, optimizer, criterion):
    epoch_loss, epoch_acc = 0, 0
    model.train()
    for text, text_lengths, label in iterator:
        optimizer.zero_grad()
        predictions = model(text, text_lengths).squeeze(1)
        loss = criterion(predictions, label)
        loss.backward()
        optimizer.step()
        epoch_loss += loss.item()
        epoch_acc += binary_accuracy(predictions, label)
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


def evaluate(model, iterator, criterion):
    epoch_loss, epoch_acc = 0, 0
    model.eval()
    with torch.no_grad():
        for text, text_lengths, label in iterator:
            predictions = model(text, text_lengths).squeeze(1)
            epoch_loss += criterion(predictions, label).item()
            epoch_acc += binary_accuracy(predictions, label)
    return epoch_loss / len(iterator), epoch_acc / len(iterator)


def main():
    random.seed(SEED)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    reviews = [write_review(rng) for _ in range(4000)]
    train_reviews, valid_reviews, test_reviews = reviews[:3000], reviews[3000:3500], reviews[3500:]
    vocab = build_vocab(train_reviews)
    train_iterator = DataLoader(ReviewDataset(train_reviews, vocab), BATCH_SIZE, shuffle=True, collate_fn=collate)
    valid_iterator = DataLoader(ReviewDataset(valid_reviews, vocab), BATCH_SIZE, collate_fn=collate)
    test_iterator = DataLoader(ReviewDataset(test_reviews, vocab), BATCH_SIZE, collate_fn=collate)

    model = RNN(len(vocab), EMBEDDING_DIM, HIDDEN_DIM, DROPOUT, vocab[PAD])
    optimizer = optim.Adam(model.parameters(), lr=4e-3)
    criterion = nn.BCEWithLogitsLoss()
    best_valid_loss = float("inf")
    for epoch in range(N_EPOCHS):
        train_loss, train_acc = train(model, train_iterator, optimizer, criterion)
        valid_loss, valid_acc = evaluate(model, valid_iterator, criterion)
        if valid_loss < best_valid_loss:
            best_valid_loss = valid_loss
            torch.save(model.state_dict(), "sentiment.pt")
        print(f"Epoch: {epoch + 1:02} | Train Loss: {train_loss:.3f} | Train Acc: {train_acc * 100:.2f}%")
        print(f"\t Val. Loss: {valid_loss:.3f} |  Val. Acc: {valid_acc * 100:.2f}%")
    model.load_state_dict(torch.load("sentiment.pt"))
    test_loss, test_acc = evaluate(model, test_iterator, criterion)
    print(f"Test Loss: {test_loss:.3f} | Test Acc: {test_acc * 100:.2f}%")


if __name__ == "__main__":
    main()
