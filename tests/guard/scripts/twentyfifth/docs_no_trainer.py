"""Text classification in the style of transformers' run_glue_no_trainer.py: which library does a docstring come from? From scratch."""

import argparse
import ast
import logging
import os
import re
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_scheduler,
)

logger = logging.getLogger(__name__)
SITE = Path(np.__file__).parents[1]
LIBRARIES = ["sklearn", "scipy", "matplotlib", "networkx", "sympy"]


def docstrings(library, limit, rng):
    files = sorted(p for p in (SITE / library).rglob("*.py") if "tests" not in p.parts)
    found = []
    for i in rng.permutation(len(files)):
        try:
            tree = ast.parse(files[i].read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and len(text := ast.get_docstring(node) or "") > 60:
                text = re.sub("|".join(LIBRARIES), "library", " ".join(text.split()), flags=re.I)
                found.append(text[:400])
        if len(found) >= limit:
            break
    return found[:limit]


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--num_warmup_steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", "0")))
    return parser.parse_args()


def build_tokenizer(texts):
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    core.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=3000, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    )
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=True)
    logging.basicConfig(level=logging.INFO)
    set_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    rows = []
    for label, library in enumerate(LIBRARIES):
        texts = docstrings(library, 480, rng)
        cut = int(0.75 * len(texts))
        rows += [(t, label, i < cut) for i, t in enumerate(texts)]
    raw_train = Dataset.from_dict(
        {"sentence": [t for t, _, own in rows if own], "label": [y for _, y, own in rows if own]}
    )
    raw_eval = Dataset.from_dict(
        {"sentence": [t for t, _, own in rows if not own], "label": [y for _, y, own in rows if not own]}
    )
    tokenizer = build_tokenizer(raw_train["sentence"])

    def preprocess_function(examples):
        result = tokenizer(examples["sentence"], max_length=args.max_length, truncation=True)
        result["labels"] = examples["label"]
        return result

    train_dataset = raw_train.map(preprocess_function, batched=True, remove_columns=raw_train.column_names)
    eval_dataset = raw_eval.map(preprocess_function, batched=True, remove_columns=raw_eval.column_names)
    data_collator = DataCollatorWithPadding(tokenizer)
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=data_collator, batch_size=64)

    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=64, hidden_dim=128, n_layers=2, n_heads=4, max_position_embeddings=args.max_length, num_labels=len(LIBRARIES),
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = DistilBertForSequenceClassification(config)
    no_decay = ["bias", "LayerNorm.weight", "layer_norm.weight"]
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": args.weight_decay,
            },
            {
                "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ],
        lr=args.learning_rate,
    )
    max_train_steps = args.num_train_epochs * -(-len(train_dataloader) // args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=max_train_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    logger.info("  Num examples = %d, optimization steps = %d", len(train_dataset), max_train_steps)
    for epoch in range(args.num_train_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        predictions, references = [], []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            p, r = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            predictions.append(p)
            references.append(r)
        accuracy = (torch.cat(predictions) == torch.cat(references)).float().mean().item()
        logger.info("epoch %d: loss %.4f accuracy %.4f", epoch, loss.item(), accuracy)
    print(f"accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
