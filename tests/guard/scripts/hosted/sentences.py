"""Find the few sentences of Python's documentation that are about the debugger: two classes, one of them rare."""

import re
from pydoc_data.topics import topics

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Value
from sklearn.metrics import accuracy_score, f1_score
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SEED = 0
CHAPTERS = ["debugger", "formatstrings", "specialnames", "compound", "typesmapping", "customization"]
NAMES = ["other", "debugger"]


def read_rows():
    rows, known = [], set()
    for chapter in CHAPTERS:
        for sentence in re.split(r"\.\s|\n\s*\n", topics[chapter]):
            text = " ".join(re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", sentence))
            begin = text.lower().split()[:20]
            if len(begin) >= 5 and tuple(begin) not in known:
                known.add(tuple(begin))
                rows.append({"text": text, "label": "debugger" if chapter == "debugger" else "other"})
    return rows


def load():
    rows = read_rows()
    features = Features({"text": Value("string"), "label": ClassLabel(names=NAMES)})
    table = {"text": [r["text"] for r in rows], "label": [NAMES.index(r["label"]) for r in rows]}
    data = Dataset.from_dict(table, features=features)
    return data.train_test_split(test_size=0.3, seed=7, stratify_by_column="label")


def make_tokenizer(texts):
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(texts, vocab_size=1500, min_frequency=2, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        model_max_length=48,
    )  # fmt: skip


tokenizer = make_tokenizer(load()["train"]["text"])


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": accuracy_score(labels, predictions), "f1": f1_score(labels, predictions)}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights
        self.model_accepts_loss_kwargs = False  # the loss below is a mean over its batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=self.class_weights)
        return (loss, outputs) if return_outputs else loss


def make_trainer():
    set_seed(SEED)
    data = load()

    def tokenize(batch):
        return tokenizer(batch["text"], truncation=True)

    train_set = data["train"].map(tokenize, batched=True)
    eval_set = data["test"].map(tokenize, batched=True)
    counts = np.bincount(train_set["label"])
    class_weights = torch.tensor(counts.sum() / (2 * counts), dtype=torch.float32)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=48, num_labels=2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=64,
        learning_rate=1e-3,
        warmup_steps=20,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="f1",
        logging_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return WeightedTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        class_weights=class_weights,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    scores = trainer.evaluate()
    print(f"accuracy {scores['eval_accuracy']:.4f}")
    print(f"FINAL f1={scores['eval_f1']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
