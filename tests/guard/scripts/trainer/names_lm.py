"""A small language model of the names of Unicode characters: GPT-2 from a config, packed blocks, accuracy of the next token."""

import unicodedata

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SEED = 0
BLOCK = 64


def load():
    names = [unicodedata.name(chr(i), "") for i in range(0x100, 0x2C00)]
    names = [n.lower() for n in names if n and "IDEOGRAPH" not in n and "BRAILLE" not in n]
    chosen = np.random.default_rng(2).permutation(len(names))[:4000]
    return Dataset.from_dict({"text": [names[int(i)] for i in chosen]}).train_test_split(test_size=0.2, seed=1)


def make_tokenizer(texts):
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=800, special_tokens=["<unk>", "<pad>", "<mask>", "</s>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", mask_token="<mask>", eos_token="</s>"
    )


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    predictions, labels = predictions[:, :-1], labels[:, 1:]
    kept = labels != -100
    return {"accuracy": float((predictions == labels)[kept].mean())}


def make_trainer():
    set_seed(SEED)
    data = load()
    tokenizer = make_tokenizer(data["train"]["text"])

    def tokenize(batch):
        return tokenizer([text + tokenizer.eos_token for text in batch["text"]])

    def group_texts(batch):
        ids = [token for row in batch["input_ids"] for token in row]
        total = len(ids) // BLOCK * BLOCK
        blocks = [ids[i : i + BLOCK] for i in range(0, total, BLOCK)]
        return {"input_ids": blocks, "attention_mask": [[1] * BLOCK for _ in blocks]}

    tokenized = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    blocks = tokenized.map(group_texts, batched=True, batch_size=1000)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=BLOCK, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir="lm-out",
        num_train_epochs=5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return Trainer(
        model=model,
        args=args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL accuracy={trainer.evaluate()['eval_accuracy']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
