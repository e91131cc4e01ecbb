"""A BiLSTM-CRF that marks names in made-up sentences (B, I, O), decoded with Viterbi."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

random.seed(0)
torch.manual_seed(0)
FIRST = "anna ben clara david emma felix greta hugo ida jonas".split()
LAST = "berg stein feld bach mann wald hof king lake rivers".split()
VERBS = "met saw called thanked visited helped".split()
PLACES = "in the house|at the lake|near king street|by the rivers|on monday|with ben".split("|")
TAGS = {"O": 0, "B": 1, "I": 2}


def sentence():
    words, tags = [], []
    for i in range(random.randint(1, 3)):
        if i:
            words.append("and")
            tags.append("O")
        words.append(random.choice(FIRST))
        tags.append("B")
        if random.random() < 0.6:
            words.append(random.choice(LAST))
            tags.append("I")
    words.append(random.choice(VERBS))
    tags.append("O")
    for _ in range(random.randint(0, 2)):
        for word in random.choice(PLACES).split():
            words.append(word)
            tags.append("B" if word == "ben" else "O")
    return words, tags


data = [sentence() for _ in range(500)]
train_data, test_data = data[:400], data[400:]
vocab = {"<pad>": 0, "<unk>": 1}
for words, _ in train_data:
    for word in words:
        vocab.setdefault(word, len(vocab))


def encode(pairs):
    ids = [torch.tensor([vocab.get(w, 1) for w in words]) for words, _ in pairs]
    tags = [torch.tensor([TAGS[t] for t in tags]) for _, tags in pairs]
    return pad_sequence(ids, batch_first=True), pad_sequence(tags, batch_first=True)


class Tagger(nn.Module):
    def __init__(self, n_words, n_tags, dim=24, hidden=24):
        super().__init__()
        self.embed = nn.Embedding(n_words, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.emit = nn.Linear(2 * hidden, n_tags)
        self.start = nn.Parameter(torch.zeros(n_tags))
        self.transitions = nn.Parameter(torch.zeros(n_tags, n_tags))  # from, to

    def scores(self, ids):
        return self.emit(self.lstm(self.embed(ids))[0])

    def path_score(self, emissions, tags, mask):
        score = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, tags.shape[1]):
            step = self.transitions[tags[:, t - 1], tags[:, t]]
            step = step + emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
            score = score + step * mask[:, t]
        return score

    def log_partition(self, emissions, mask):
        alpha = self.start + emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            step = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, dim=1) + emissions[:, t]
            alpha = torch.where(mask[:, t].unsqueeze(1) > 0, step, alpha)
        return torch.logsumexp(alpha, dim=1)

    def loss(self, ids, tags):
        mask = (ids != 0).float()
        emissions = self.scores(ids)
        return (self.log_partition(emissions, mask) - self.path_score(emissions, tags, mask)).mean()

    def decode(self, ids):
        emissions = self.scores(ids)[0]
        best, back = self.start + emissions[0], []
        for emission in emissions[1:]:
            values, origin = (best.unsqueeze(1) + self.transitions).max(dim=0)
            best = values + emission
            back.append(origin)
        path = [best.argmax().item()]
        for origin in reversed(back):
            path.append(origin[path[-1]].item())
        return path[::-1]


model = Tagger(len(vocab), len(TAGS))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(6):
    model.train()
    random.shuffle(train_data)
    total = 0.0
    for start in range(0, len(train_data), 20):
        ids, tags = encode(train_data[start : start + 20])
        optimizer.zero_grad()
        loss = model.loss(ids, tags)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: loss {total / 20:.4f}")

model.eval()
right = total = 0
with torch.no_grad():
    for pair in test_data:
        ids, tags = encode([pair])
        right += sum(p == t for p, t in zip(model.decode(ids), tags[0].tolist()))
        total += tags.shape[1]
print(f"FINAL accuracy={right / total:.4f}")
