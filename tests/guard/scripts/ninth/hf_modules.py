"""Which module of Python's library is a piece of code from? A tiny BERT from a config, trained with transformers' Trainer."""

import os
import random

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

SEED = 0
set_seed(SEED)

MODULES = ["argparse", "calendar", "decimal", "difflib", "ftplib", "mailbox", "pickle", "tarfile"]
MAX_LENGTH = 48
PAD, CLS, UNK = 0, 1, 2


def read_pieces(name, lines_per_piece=4):
    """Pieces of some lines, as words."""
    source = "_pydecimal" if name == "decimal" else name
    with open(os.path.join(os.path.dirname(os.__file__), source + ".py"), encoding="utf8") as f:
        lines = [line for line in f if line.strip()]
    pieces = ["".join(lines[i : i + lines_per_piece]) for i in range(0, len(lines), lines_per_piece)]
    for c in "().,:=[]'\"{}":
        pieces = [p.replace(c, f" {c} ") for p in pieces]
    return [p.split() for p in pieces]


examples = [(piece, name) for name in MODULES for piece in random.sample(read_pieces(name), 150)]
random.shuffle(examples)
n_train = int(0.8 * len(examples))
train_examples, eval_examples = examples[:n_train], examples[n_train:]

counts = {}
for words, _ in train_examples:
    for w in words:
        counts[w] = counts.get(w, 0) + 1
vocab = {w: i + 3 for i, w in enumerate(sorted(w for w, c in counts.items() if c > 2))}
label2id = {name: i for i, name in enumerate(MODULES)}


class PieceDataset(Dataset):
    def __init__(self, examples):
        self.encodings = [self.tokenize(words) for words, _ in examples]
        self.labels = [label2id[name] for _, name in examples]

    @staticmethod
    def tokenize(words):
        ids = [CLS] + [vocab.get(w, UNK) for w in words]
        return ids[:MAX_LENGTH]

    def __getitem__(self, idx):
        return {"input_ids": self.encodings[idx], "labels": self.labels[idx]}

    def __len__(self):
        return len(self.labels)


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    ids = torch.tensor([f["input_ids"] + [PAD] * (longest - len(f["input_ids"])) for f in features])
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": torch.tensor([f["labels"] for f in features]),
    }


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


config = BertConfig(
    vocab_size=len(vocab) + 3,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=MAX_LENGTH,
    num_labels=len(MODULES),
)
model = BertForSequenceClassification(config)

training_args = TrainingArguments(
    output_dir="results",
    seed=SEED,
    num_train_epochs=8,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=64,
    learning_rate=1e-3,
    warmup_steps=40,
    weight_decay=0.01,
    logging_steps=40,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=PieceDataset(train_examples),
    eval_dataset=PieceDataset(eval_examples),
    data_collator=collate,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
print(metrics)
print(f"FINAL accuracy={metrics['eval_accuracy']:.4f}")
