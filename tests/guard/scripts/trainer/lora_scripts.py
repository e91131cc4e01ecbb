"""A BERT is trained to fill in masked words of Unicode names, then a LoRA with a new head tells their categories. Trainer and peft."""

import functools
import unicodedata

import numpy as np
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from sklearn.metrics import accuracy_score
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SEED = 0
CATEGORIES = ["Ll", "Lo", "Lu", "Mn", "Nd", "Sm", "So"]


def load():
    draw = np.random.default_rng(8)
    by = {code: [] for code in CATEGORIES}
    for i in range(0x80, 0x11000):
        name, code = unicodedata.name(chr(i), ""), unicodedata.category(chr(i))
        if name and code in by and "IDEOGRAPH" not in name and "SYLLABLE" not in name:
            by[code].append({"text": name.lower(), "labels": CATEGORIES.index(code)})
    rows = [some[int(i)] for some in by.values() for i in draw.permutation(len(some))[:220]]
    return Dataset.from_list([rows[int(i)] for i in draw.permutation(len(rows))]).train_test_split(0.25, seed=1)


def make_tokenizer(texts):
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=900, min_frequency=2, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip


def make_config(tokenizer):
    return BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=len(CATEGORIES), pad_token_id=tokenizer.pad_token_id, hidden_dropout_prob=0.0,
    )  # fmt: skip


def arguments(folder, epochs, rate, **more):
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=rate,
        warmup_steps=10,
        save_strategy="no",
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
        **more,
    )


@functools.lru_cache
def pretrained():
    """(tokenizer, weights of the encoder) as another group would publish them."""
    set_seed(SEED)
    texts = load()["train"]["text"]
    tokenizer = make_tokenizer(texts)
    rows = Dataset.from_dict(dict(tokenizer(list(texts), truncation=True, max_length=32)))
    model = BertForMaskedLM(make_config(tokenizer))
    Trainer(
        model=model,
        args=arguments("mlm-out", 3, 2e-3),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2),
    ).train()
    return tokenizer, {name: value.clone() for name, value in model.bert.state_dict().items()}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": accuracy_score(labels, logits.argmax(axis=-1))}


def make_trainer():
    tokenizer, weights = pretrained()
    set_seed(SEED)
    data = load()

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True, max_length=32)

    tokenized = data.map(tokenize, batched=True, remove_columns=["text"])
    base = BertForSequenceClassification(make_config(tokenizer))
    base.bert.load_state_dict(weights, strict=False)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=16,
        lora_alpha=32,
        lora_dropout=0.0,
        target_modules=["query", "key", "value"],
    )
    model = get_peft_model(base, lora)
    return Trainer(
        model=model,
        args=arguments("lora-out", 5, 5e-3, eval_strategy="epoch"),
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL accuracy={trainer.evaluate()['eval_accuracy']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
