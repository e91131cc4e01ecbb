"""What a word of Python code is (keyword, definition, call, attribute, other), by a tiny BERT: transformers' Trainer with an own collator and an
own compute_loss (class weights). The words are lower-case letters of the standard library's modules, one line at a time."""

import argparse
import doctest  # noqa: E401
import inspect
import io
import keyword
import optparse
import tempfile
import tokenize

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

SEED = 0
TAGS = ["other", "keyword", "definition", "call", "attribute"]
CHARS = {c: i + 3 for i, c in enumerate("abcdefghijklmnopqrstuvwxyz_0123456789()[]{}.,:=+-*/'\"#@ <>!%\\&|~^")}
PAD, UNKNOWN, WORD = 0, 1, 2


def tagged_lines(module):
    """(tokens of a line, tag of each) for the lines of a module's source."""
    rows, tokens, tags, before = [], [], [], ""
    read = list(tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline))
    for token, after in zip(read, read[1:] + [read[-1]]):
        if token.type in (tokenize.NEWLINE, tokenize.NL):
            if 3 <= len(tokens) <= 24 and any(tags):
                rows.append((tokens, tags))
            tokens, tags = [], []
        elif token.type in (tokenize.NAME, tokenize.OP):
            tag = 0
            if token.type == tokenize.NAME:
                if keyword.iskeyword(token.string):
                    tag = 1
                elif before in ("def", "class"):
                    tag = 2
                elif after.string == "(":
                    tag = 3
                elif before == ".":
                    tag = 4
            tokens.append(token.string)
            tags.append(tag)
            before = token.string
    return rows


TRAIN_ROWS = [r for m in (argparse, optparse) for r in tagged_lines(m)][:1600]
VAL_ROWS = tagged_lines(doctest)[:400]
VOCAB = {}
for words, _ in TRAIN_ROWS:
    for w in words:
        VOCAB[w] = VOCAB.get(w, 0) + 1
VOCAB = {w: i + 2 for i, w in enumerate(sorted(w for w, n in VOCAB.items() if n >= 4))}


class Lines(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, tags = self.rows[i]
        return {"input_ids": [VOCAB.get(w, UNKNOWN) for w in words], "labels": tags}


def collate(features):
    ids = [torch.tensor(f["input_ids"]) for f in features]
    labels = [torch.tensor(f["labels"]) for f in features]
    input_ids = pad_sequence(ids, batch_first=True, padding_value=PAD)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


counts = np.bincount([t for _, tags in TRAIN_ROWS for t in tags], minlength=len(TAGS))
WEIGHTS = torch.tensor(np.sqrt(counts.sum() / (len(TAGS) * counts)), dtype=torch.float32)


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits.view(-1, len(TAGS)), labels.view(-1), weight=WEIGHTS, ignore_index=-100
        )
        inputs["labels"] = labels
        return (loss, outputs) if return_outputs else loss


def compute_metrics(prediction):
    guess, truth = prediction.predictions.argmax(-1), prediction.label_ids
    kept = truth != -100
    recalls = [(guess[kept & (truth == c)] == c).mean() for c in range(len(TAGS))]
    return {"recall": float(np.mean(recalls))}


def make_trainer():
    config = BertConfig(
        vocab_size=len(VOCAB) + 2, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=len(TAGS),
    )  # fmt: skip
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), num_train_epochs=6, per_device_train_batch_size=32,
        per_device_eval_batch_size=128, learning_rate=2e-3, warmup_steps=20, weight_decay=0.01, eval_strategy="epoch",
        save_strategy="no", metric_for_best_model="recall", greater_is_better=True, report_to=[], seed=SEED,
        use_cpu=True, disable_tqdm=True, logging_steps=50, remove_unused_columns=False,
    )  # fmt: skip
    return WeightedTrainer(
        model=BertForTokenClassification(config), args=args, train_dataset=Lines(TRAIN_ROWS),
        eval_dataset=Lines(VAL_ROWS), data_collator=collate, compute_metrics=compute_metrics,
    )  # fmt: skip


def main():
    set_seed(SEED)
    trainer = make_trainer()
    print(len(TRAIN_ROWS), len(VAL_ROWS), len(VOCAB))
    trainer.train()
    print(f"FINAL recall={trainer.evaluate()['eval_recall']:.4f}")


if __name__ == "__main__":
    main()
