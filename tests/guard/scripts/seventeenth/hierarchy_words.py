"""Next-word model with a two-level (class-factored) softmax: first the word's cluster, then the word within the cluster."""

import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

random.seed(0)
torch.manual_seed(0)
NOUNS = "cat dog bird fox cow hen pig owl".split()
COLOURS = "red green blue white black grey".split()
VERBS = "sees hears likes finds feeds follows".split()
PLACES = "barn yard field house wood lake".split()


def text(n):
    words = []
    for _ in range(n):
        subject = random.choice(NOUNS)
        words += ["the", random.choice(COLOURS), subject, VERBS[NOUNS.index(subject) % 6], "the"]
        if random.random() < 0.5:
            words.append(random.choice(COLOURS))
        words.append(random.choice(NOUNS))
        place = PLACES[NOUNS.index(subject) % 6]
        words += ["in", "the", place, "."]
    return words


train_words, test_words = text(1200), text(200)
counts = {}
for word in train_words:
    counts[word] = counts.get(word, 0) + 1
vocab = sorted(counts, key=lambda w: (-counts[w], w))
index = {word: i for i, word in enumerate(vocab)}
CLUSTER = 6
n_clusters = math.ceil(len(vocab) / CLUSTER)


def ids(words):
    return torch.tensor([index[w] for w in words])


class TwoLevelSoftmax(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cluster = nn.Linear(dim, n_clusters)
        self.within = nn.Parameter(torch.randn(n_clusters, CLUSTER, dim) * 0.1)
        self.bias = nn.Parameter(torch.zeros(n_clusters, CLUSTER))
        exists = torch.arange(n_clusters * CLUSTER).view(n_clusters, CLUSTER) < len(vocab)
        self.register_buffer("exists", exists)

    def log_prob(self, hidden, target):
        cluster, place = target // CLUSTER, target % CLUSTER
        log_cluster = F.log_softmax(self.cluster(hidden), dim=-1).gather(1, cluster.unsqueeze(1)).squeeze(1)
        scores = torch.einsum("nd,nkd->nk", hidden, self.within[cluster]) + self.bias[cluster]
        scores = scores.masked_fill(~self.exists[cluster], float("-inf"))
        log_within = F.log_softmax(scores, dim=-1).gather(1, place.unsqueeze(1)).squeeze(1)
        return log_cluster + log_within


class WordModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(len(vocab), dim)
        self.gru = nn.GRU(dim, 48, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.out = TwoLevelSoftmax(48)

    def forward(self, x, y, state=None):
        hidden, state = self.gru(self.embed(x), state)
        hidden = self.drop(hidden)
        return -self.out.log_prob(hidden.flatten(0, 1), y.flatten()).mean(), state


BATCH, STEPS = 16, 20
stream = ids(train_words)
stream = stream[: len(stream) // BATCH * BATCH].view(BATCH, -1)
model = WordModel()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def perplexity():
    model.eval()
    sequence = ids(test_words).unsqueeze(0)
    with torch.no_grad():
        loss, _ = model(sequence[:, :-1], sequence[:, 1:])
    return math.exp(loss.item())


for epoch in range(8):
    model.train()
    state, losses = None, []
    for start in range(0, stream.shape[1] - STEPS, STEPS):
        x = stream[:, start : start + STEPS]
        y = stream[:, start + 1 : start + STEPS + 1]
        loss, state = model(x, y, state)
        state = state.detach()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    scheduler.step()
    print(f"epoch {epoch + 1}: train loss {sum(losses) / len(losses):.3f}, test perplexity {perplexity():.3f}")
print(f"FINAL perplexity={perplexity():.3f}")
