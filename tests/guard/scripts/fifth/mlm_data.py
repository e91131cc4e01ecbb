"""Data for bert_mlm.py: tokens of Python's documentation topics, cut in lines with padding."""

import re
from collections import Counter
from pydoc_data.topics import topics

import torch

PAD, UNK, CLS, MASK = 0, 1, 2, 3
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[MASK]"]


def sentences():
    out = []
    for name in sorted(topics):
        for part in re.split(r"\n\s*\n|\. ", topics[name].lower()):
            words = re.findall(r"[a-z_]+|[^\sa-z_0-9*=-]", part)
            if len(words) >= 6:
                out.append(words[:22])
    return out


class WordTokenizer:
    def __init__(self, texts, size=400):
        counts = Counter(w for t in texts for w in t)
        self.itos = SPECIAL + [w for w, _ in counts.most_common(size - len(SPECIAL))]
        self.stoi = {w: i for i, w in enumerate(self.itos)}

    def __len__(self):
        return len(self.itos)

    def encode(self, words):
        return [CLS] + [self.stoi.get(w, UNK) for w in words]


def pad_collate(batch):
    longest = max(len(ids) for ids in batch)
    return torch.tensor([ids + [PAD] * (longest - len(ids)) for ids in batch])
