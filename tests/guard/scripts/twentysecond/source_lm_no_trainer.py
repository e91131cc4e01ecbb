"""A small GPT-NeoX trained on Python source, after run_clm_no_trainer.py: Accelerate and a loop written by hand."""

# fmt: off
import argparse
import math
import os
import sysconfig
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedTokenizerFast,
    default_data_collator,
    get_scheduler,
)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--num_warmup_steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("SEED", 0)))
    return parser.parse_args([])


def load_sources():
    folder = Path(sysconfig.get_path("stdlib")) / "unittest"
    files = sorted(folder.glob("*.py")) + sorted((folder.parent / "email").glob("*.py"))
    texts = [f.read_text() for f in files if f.stat().st_size > 1500]
    test = texts[::6]
    train = [t for i, t in enumerate(texts) if i % 6]
    return DatasetDict(train=Dataset.from_dict({"text": train}), validation=Dataset.from_dict({"text": test}))


def train_tokenizer(texts):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=800, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps, cpu=True)
    set_seed(args.seed)

    raw_datasets = load_sources()
    tokenizer = train_tokenizer(raw_datasets["train"]["text"])
    tokenized = raw_datasets.map(
        lambda examples: tokenizer([t + tokenizer.eos_token for t in examples["text"]], return_token_type_ids=False),
        batched=True,
        remove_columns=["text"],
    )
    block_size = args.block_size

    def group_texts(examples):
        concatenated = {k: list(chain(*examples[k])) for k in examples}
        total_length = len(concatenated["input_ids"])
        total_length = (total_length // block_size) * block_size
        result = {k: [t[i : i + block_size] for i in range(0, total_length, block_size)] for k, t in concatenated.items()}
        result["labels"] = [ids.copy() for ids in result["input_ids"]]
        return result

    lm_datasets = tokenized.map(group_texts, batched=True)
    train_dataset, eval_dataset = lm_datasets["train"], lm_datasets["validation"]
    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size)

    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=block_size, bos_token_id=0, eos_token_id=0, hidden_dropout=0.0, attention_dropout=0.0,
        )
    )
    no_decay = ["bias", "layer_norm", "layernorm"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)

    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * steps_per_epoch
    lr_scheduler = get_scheduler(
        name="cosine",
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    def evaluate():
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["input_ids"]))))
        return math.exp(torch.cat(losses).mean().item())

    completed_steps = 0
    for epoch in range(args.num_train_epochs):
        model.train()
        total_loss = 0.0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.item()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
        perplexity = evaluate()
        accelerator.print(f"epoch {epoch} step {completed_steps}: train loss {total_loss / len(train_dataloader):.3f}, perplexity {perplexity:.2f}")
    accelerator.print(f"perplexity {perplexity:.3f}")


if __name__ == "__main__":
    main()
