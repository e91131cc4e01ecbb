"""Name the spans of a line of Python: what it calls, defines and imports. Word pieces and BIO tags, as in transformers' NER example."""

import argparse
import ast
import asyncio.base_events
import csv
import difflib
import email.message
import inspect
import logging
import mailbox
import random
import re
import tarfile
import textwrap
import zipfile

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SEED = 0
TRAIN_FILES = [argparse, ast, csv, difflib, email.message, logging, mailbox, tarfile]
TEST_FILES = [zipfile, asyncio.base_events]
LABELS = ["O", "B-CALL", "I-CALL", "B-DEF", "I-DEF", "B-MODULE", "I-MODULE"]
label2id = {name: i for i, name in enumerate(LABELS)}
KEYWORDS = {
    "if",
    "in",
    "and",
    "or",
    "not",
    "return",
    "yield",
    "while",
    "elif",
    "assert",
    "is",
    "lambda",
    "for",
    "raise",
    "del",
}


def tag_line(line):
    words = re.findall(r"[A-Za-z_]\w*|\d+|[^\s\w]", line)
    tags, i = ["O"] * len(words), 0
    while i < len(words):
        if not re.match(r"[A-Za-z_]", words[i]):
            i += 1
            continue
        end = i + 1
        while end + 1 < len(words) and words[end] == "." and re.match(r"[A-Za-z_]", words[end + 1]):
            end += 2
        before = words[i - 1] if i else ""
        kind = None
        if before in ("def", "class"):
            kind = "DEF"
        elif before in ("import", "from"):
            kind = "MODULE"
        elif end < len(words) and words[end] == "(" and words[i] not in KEYWORDS:
            kind = "CALL"
        if kind:
            tags[i:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - i - 1)
        i = end
    return words[:24], tags[:24]


def read(files, count, known=()):
    rows, known = {"tokens": [], "ner_tags": []}, {tuple(words) for words in known}
    for module in files:
        for line in textwrap.dedent(inspect.getsource(module)).splitlines():
            line = line.split("#")[0]
            words, tags = tag_line(line)
            if len(words) >= 4 and '"""' not in line and tuple(words) not in known:
                known.add(tuple(words))
                rows["tokens"].append(words)
                rows["ner_tags"].append([label2id[t] for t in tags])
    keep = random.Random(1).sample(range(len(rows["tokens"])), min(count, len(rows["tokens"])))
    return Dataset.from_dict({k: [v[i] for i in keep] for k, v in rows.items()})


def make_tokenizer(lines):
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        (" ".join(words) for words in lines),
        trainers.WordPieceTrainer(
            vocab_size=500, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
        ),
    )
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", inner.token_to_id("[CLS]")), ("[SEP]", inner.token_to_id("[SEP]"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )


tokenizer = make_tokenizer(read(TRAIN_FILES, 1800)["tokens"])


def spans(tags):
    found, start = set(), None
    for i, tag in enumerate([*tags, "O"]):
        if start is not None and (tag == "O" or tag[0] == "B" or tag[2:] != tags[start][2:]):
            found.add((start, i, tags[start][2:]))
            start = None
        if start is None and tag != "O":
            start = i
    return found


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    right = predicted = gold = 0
    for row, truth in zip(predictions, labels):
        said = spans([LABELS[p] for p, label in zip(row, truth) if label != -100])
        known = spans([LABELS[label] for p, label in zip(row, truth) if label != -100])
        right, predicted, gold = right + len(said & known), predicted + len(said), gold + len(known)
    return {
        "precision": right / max(predicted, 1),
        "recall": right / max(gold, 1),
        "f1": 2 * right / max(predicted + gold, 1),
        "accuracy": float((predictions == labels)[labels != -100].mean()),
    }


def make_trainer():
    set_seed(SEED)
    train_lines = read(TRAIN_FILES, 1800)
    test_lines = read(TEST_FILES, 600, train_lines["tokens"])

    def tokenize_and_align_labels(examples):
        tokenized = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
        labels = []
        for i, tags in enumerate(examples["ner_tags"]):
            previous, ids = None, []
            for word in tokenized.word_ids(batch_index=i):
                if word is None:
                    ids.append(-100)
                elif word != previous:
                    ids.append(tags[word])
                else:
                    ids.append(-100)
                previous = word
            labels.append(ids)
        tokenized["labels"] = labels
        return tokenized

    train_set = train_lines.map(tokenize_and_align_labels, batched=True, remove_columns=train_lines.column_names)
    test_set = test_lines.map(tokenize_and_align_labels, batched=True, remove_columns=test_lines.column_names)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, num_labels=len(LABELS),
        id2label=dict(enumerate(LABELS)), label2id=label2id,
    )  # fmt: skip
    model = BertForTokenClassification(config)
    args = TrainingArguments(
        "ner-out",
        num_train_epochs=5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return Trainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        compute_metrics=compute_metrics,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL f1={trainer.evaluate()['eval_f1']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
