"""Text classification without Trainer, in the style of transformers' run_glue_no_trainer.py: which library is a docstring's sentence from?"""

import argparse
import ast
import glob
import importlib.util
import math
import os
import random
import re

import numpy as np
import torch
from sklearn.metrics import f1_score
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, get_scheduler, set_seed

LABELS = ["sklearn", "torch", "matplotlib", "pandas"]


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a transformers model on a text classification task")
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=20)
    parser.add_argument("--output_dir", default="glue_out")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def first_sentences(library, limit=700):
    """The first sentence of the docstrings of a library's functions and classes."""
    root = os.path.dirname(importlib.util.find_spec(library).origin)
    files = sorted(glob.glob(os.path.join(root, "**", "*.py"), recursive=True), key=lambda p: (len(p), p))
    found = []
    for path in (p for p in files if "/tests/" not in p):
        with open(path, encoding="utf8") as f:
            tree = ast.parse(f.read())
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (doc := ast.get_docstring(node)):
                sentence = re.split(r"\.\s|\n\s*\n", doc)[0]
                if 5 <= len(sentence.split()) <= 40 and sentence not in found:
                    found.append(" ".join(sentence.split()))
        if len(found) >= limit:
            break
    return found[:limit]


def load_splits():
    rows = [{"sentence": s, "label": i} for i, name in enumerate(LABELS) for s in first_sentences(name)]
    random.Random(7).shuffle(rows)
    cut = int(0.75 * len(rows))
    return {"train": rows[:cut], "validation": rows[cut:]}


def train_tokenizer(sentences):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(sentences, trainers.WordPieceTrainer(vocab_size=2500, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def main():
    args = parse_args()
    set_seed(args.seed)
    raw_datasets = load_splits()
    tokenizer = train_tokenizer([row["sentence"] for row in raw_datasets["train"]])
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, num_labels=len(LABELS), hidden_dropout_prob=0.2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)

    def preprocess_function(example):
        result = tokenizer(example["sentence"], max_length=args.max_length, truncation=True)
        return {"input_ids": result["input_ids"], "labels": example["label"]}

    train_dataset = [preprocess_function(row) for row in raw_datasets["train"]]
    eval_dataset = [preprocess_function(row) for row in raw_datasets["validation"]]

    def data_collator(features):
        longest = max(len(f["input_ids"]) for f in features)
        input_ids = torch.full((len(features), longest), tokenizer.pad_token_id)
        for i, f in enumerate(features):
            input_ids[i, : len(f["input_ids"])] = torch.tensor(f["input_ids"])
        attention_mask = (input_ids != tokenizer.pad_token_id).long()
        labels = torch.tensor([f["labels"] for f in features])
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=data_collator, batch_size=args.per_device_eval_batch_size)

    # Optimizer
    # Split weights in two groups, one with weight decay and the other not.
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)

    # Scheduler and math around the number of training steps.
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=max_train_steps,
    )

    completed_steps, best_f1 = 0, 0.0
    os.makedirs(args.output_dir, exist_ok=True)
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if (
                step % args.gradient_accumulation_steps == args.gradient_accumulation_steps - 1
                or step == len(train_dataloader) - 1
            ):
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1

        model.eval()
        all_predictions = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            all_predictions.append(outputs.logits.argmax(dim=-1).numpy())
        predictions = np.concatenate(all_predictions)
        references = np.array([row["label"] for row in raw_datasets["validation"]])
        accuracy = (predictions == references).mean()
        f1 = f1_score(references, predictions, average="macro")
        print(f"epoch {epoch}: train loss {total_loss / len(train_dataloader):.4f} accuracy {accuracy:.4f} f1 {f1:.4f}")
        if f1 > best_f1:
            best_f1 = f1
            model.save_pretrained(args.output_dir)
    print(f"steps {completed_steps}")
    print(f"FINAL f1={best_f1:.4f}")


if __name__ == "__main__":
    main()
