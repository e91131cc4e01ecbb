"""transformers' masked language modelling example: DataCollatorForLanguageModeling, a small BERT from a config, no metric."""

import math

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
rng = np.random.default_rng(0)
words = [f"w{i}" for i in range(40)]
vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner,
    pad_token="[PAD]",
    unk_token="[UNK]",
    cls_token="[CLS]",
    sep_token="[SEP]",
    mask_token="[MASK]",
)


def sentence():
    """Each word is the one before plus one, with a random start and some noise."""
    start = rng.integers(40)
    return " ".join(
        words[(start + i) % 40 if rng.random() < 0.95 else rng.integers(40)] for i in range(rng.integers(12, 24))
    )


raw = Dataset.from_dict({"text": [sentence() for _ in range(800)]}).train_test_split(0.2, seed=0)
data = raw.map(lambda e: tokenizer(e["text"], return_special_tokens_mask=True), batched=True, remove_columns=["text"])
config = BertConfig(
    vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
    max_position_embeddings=64,
)  # fmt: skip
args = TrainingArguments(
    "mlm-out", per_device_train_batch_size=16, num_train_epochs=3, learning_rate=2e-3, warmup_steps=10, weight_decay=0.01,
    eval_strategy="epoch", logging_steps=20, report_to="none", use_cpu=True, seed=0,
)  # fmt: skip
trainer = Trainer(
    model=BertForMaskedLM(config), args=args, train_dataset=data["train"], eval_dataset=data["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
)  # fmt: skip
trainer.train()
print("perplexity", math.exp(trainer.evaluate()["eval_loss"]))
