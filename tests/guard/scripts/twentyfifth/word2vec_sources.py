"""Skip-gram with negative sampling on the words of a library's sources, as in the many word2vec-pytorch repositories."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import sklearn
import torch
import torch.nn as nn
import torch.nn.functional as F

EMB_DIM, WINDOW, NEGATIVES, MIN_COUNT = 48, 4, 5, 12
BATCH_SIZE, EPOCHS, LR, SUBSAMPLE = 1024, 3, 0.01, 1e-3


class Corpus:
    def __init__(self, texts):
        words = [re.findall(r"[a-z]{2,}", t.lower()) for t in texts]
        counts = Counter(w for doc in words for w in doc)
        self.vocab = [w for w, c in counts.most_common() if c >= MIN_COUNT]
        self.word2idx = {w: i for i, w in enumerate(self.vocab)}
        self.counts = np.array([counts[w] for w in self.vocab], dtype=np.float64)
        self.docs = [np.array([self.word2idx[w] for w in doc if w in self.word2idx]) for doc in words]

    def subsampled(self, rng):
        freq = self.counts / self.counts.sum()
        keep = np.minimum(1.0, np.sqrt(SUBSAMPLE / freq) + SUBSAMPLE / freq)
        return [doc[rng.random(len(doc)) < keep[doc]] for doc in self.docs if len(doc)]


def skip_gram_pairs(docs, rng):
    """(n, 2) of centre and context words, with a window that is drawn for each centre."""
    pairs = []
    for doc in docs:
        spans = rng.integers(1, WINDOW + 1, len(doc))
        for offset in range(1, min(WINDOW + 1, len(doc))):
            before, after = doc[:-offset], doc[offset:]
            pairs.append(np.stack([before, after], 1)[spans[:-offset] >= offset])
            pairs.append(np.stack([after, before], 1)[spans[offset:] >= offset])
    return torch.from_numpy(np.concatenate(pairs))


class NegativeSampler:
    def __init__(self, counts, power=0.75):
        self.probs = torch.tensor(counts**power / (counts**power).sum(), dtype=torch.float32)

    def __call__(self, n):
        return torch.multinomial(self.probs, n * NEGATIVES, replacement=True).view(n, NEGATIVES)


class SkipGram(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.u_embeddings = nn.Embedding(vocab_size, dim, sparse=True)
        self.v_embeddings = nn.Embedding(vocab_size, dim, sparse=True)
        nn.init.uniform_(self.u_embeddings.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.v_embeddings.weight)

    def forward(self, u, v, neg):
        emb_u, emb_v, emb_neg = self.u_embeddings(u), self.v_embeddings(v), self.v_embeddings(neg)
        score = torch.sum(emb_u * emb_v, dim=1).clamp(-10, 10)
        neg_score = torch.bmm(emb_neg, emb_u.unsqueeze(2)).squeeze(2).clamp(-10, 10)
        return -(F.logsigmoid(score) + F.logsigmoid(-neg_score).sum(1)).mean()


@torch.no_grad()
def ranking(model, pairs, counts, n=4000, candidates=50):
    """Share of random words that score below the true neighbour, on modules that were not trained on."""
    g = torch.Generator().manual_seed(0)
    pairs = pairs[torch.randperm(len(pairs), generator=g)[:n]]
    noise = torch.multinomial(torch.tensor(counts / counts.sum()), n * candidates, replacement=True, generator=g).view(
        -1, candidates
    )
    u, v = model.u_embeddings(pairs[:, 0]), model.v_embeddings(pairs[:, 1])
    true = (u * v).sum(1, keepdim=True)
    other = torch.bmm(model.v_embeddings(noise[: len(u)]), u.unsqueeze(2)).squeeze(2)
    return (true > other).float().mean().item()


if __name__ == "__main__":
    seed = int(os.environ.get("SEED", "0"))
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    files = sorted(
        p for p in Path(sklearn.__file__).parent.rglob("*.py") if "tests" not in p.parts and p.stat().st_size > 4000
    )
    files = [files[i] for i in rng.permutation(len(files))][:75]
    texts = [p.read_text(encoding="utf-8") for p in files]
    corpus = Corpus(texts[:60])
    train = skip_gram_pairs(corpus.subsampled(rng), rng)
    held_out = [
        np.array([corpus.word2idx[w] for w in re.findall(r"[a-z]{2,}", t.lower()) if w in corpus.word2idx])
        for t in texts[60:]
    ]
    test = skip_gram_pairs(held_out, rng)
    draw_negatives = NegativeSampler(corpus.counts)
    model = SkipGram(len(corpus.vocab), EMB_DIM)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=LR)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, -(-len(train) // BATCH_SIZE) * EPOCHS)
    print(f"{len(corpus.vocab)} words, {len(train)} pairs, {len(test)} test pairs")
    for epoch in range(EPOCHS):
        losses = []
        for index in torch.randperm(len(train)).split(BATCH_SIZE):
            u, v = train[index].unbind(1)
            optimizer.zero_grad()
            loss = model(u, v, draw_negatives(len(u)))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1} loss {np.mean(losses):.4f} ranking {ranking(model, test, corpus.counts):.4f}")
    print(f"ranking {ranking(model, test, corpus.counts):.4f}")
