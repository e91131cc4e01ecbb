"""Tags every character of a line of Python (comment, string, keyword, name ...) with a tiny BERT, trained by transformers' Trainer."""

import io
import keyword
import os
import random
import sysconfig
import tempfile
import tokenize
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

SEED = int(os.environ.get("SEED", "0"))
TAGS = ["other", "comment", "string", "keyword", "name", "number", "operator"]
TRAIN_FILES = ["argparse.py", "tarfile.py", "inspect.py", "subprocess.py", "zipfile.py", "statistics.py"]
TEST_FILES = ["textwrap.py", "shutil.py", "fractions.py"]
PAD, CLS, OFFSET = 0, 1, 2


def tag_of(token):
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "name"
    names = {tokenize.COMMENT: "comment", tokenize.STRING: "string", tokenize.NUMBER: "number", tokenize.OP: "operator"}
    return names.get(token.type, "other")


def read_lines(files):
    """Rows of (characters, tags), one a line. Lines within multi-line strings are left out."""
    rows = []
    for file in files:
        text = (Path(sysconfig.get_paths()["stdlib"]) / file).read_text()
        lines = text.splitlines()
        tags = [[0] * len(line) for line in lines]
        long = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            (row, start), (last, end) = token.start, token.end
            if last > row:
                long.update(range(row - 1, last))
            elif row <= len(lines):
                tags[row - 1][start:end] = [TAGS.index(tag_of(token))] * (min(end, len(lines[row - 1])) - start)
        for i, line in enumerate(lines):
            body = line.strip()
            if i not in long and 10 <= len(body) <= 70 and body.isascii():
                at = line.index(body)
                rows.append({"text": body, "tags": tags[i][at : at + len(body)]})
    return rows


class LineDataset(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {"input_ids": [CLS] + [ord(c) + OFFSET for c in row["text"]], "labels": [-100] + row["tags"]}


class Collator:
    """Pads a batch to its longest line."""

    def __call__(self, features):
        width = max(len(f["input_ids"]) for f in features)
        batch = {"input_ids": [], "attention_mask": [], "labels": []}
        for f in features:
            gap = width - len(f["input_ids"])
            batch["input_ids"].append(f["input_ids"] + [PAD] * gap)
            batch["attention_mask"].append([1] * len(f["input_ids"]) + [0] * gap)
            batch["labels"].append(f["labels"] + [-100] * gap)
        return {name: torch.tensor(value) for name, value in batch.items()}


def compute_metrics(prediction):
    predicted = prediction.predictions.argmax(-1)
    labels = prediction.label_ids
    scored = labels != -100
    right = predicted[scored] == labels[scored]
    recalls = [right[labels[scored] == tag].mean() for tag in np.unique(labels[scored])]
    return {"accuracy": right.mean(), "macro_recall": np.mean(recalls)}


def main():
    set_seed(SEED)
    rows = read_lines(TRAIN_FILES)
    random.shuffle(rows)
    train_set, test_set = LineDataset(rows[:3000]), LineDataset(read_lines(TEST_FILES))
    config = BertConfig(
        vocab_size=128 + OFFSET, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=80, pad_token_id=PAD, num_labels=len(TAGS), hidden_dropout_prob=0.05,
    )  # fmt: skip
    model = BertForTokenClassification(config)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.01,
        warmup_steps=50,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        data_collator=Collator(),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(f"macro_recall {trainer.evaluate()['eval_macro_recall']:.4f}")


if __name__ == "__main__":
    main()
