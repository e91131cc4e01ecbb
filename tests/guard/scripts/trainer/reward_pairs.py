"""A reward model that prefers the right category of a Unicode character to a wrong one. TRL's RewardTrainer, Llama from a config."""

import unicodedata

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast, set_seed
from trl import RewardConfig, RewardTrainer

SEED = 0
CATEGORIES = {
    "Lu": "uppercase letter",
    "Ll": "lowercase letter",
    "Mn": "mark",
    "Nd": "digit",
    "So": "symbol",
    "Sm": "operator",
}


def load():
    """Two answers to a question and which of them the rater preferred."""
    draw = np.random.default_rng(5)
    by = {code: [] for code in CATEGORIES}
    for i in range(0x80, 0x11000):
        name, code = unicodedata.name(chr(i), ""), unicodedata.category(chr(i))
        if name and code in by:
            by[code].append(name.lower())
    rows = []
    for code, names in by.items():
        for name in draw.permutation(names)[:250]:
            right = f"that is a {CATEGORIES[code]}"
            wrong = f"that is a {CATEGORIES[draw.choice([c for c in CATEGORIES if c != code])]}"
            first = bool(draw.random() < 0.5)
            rows.append(
                {
                    "question": f"what is {name} ?",
                    "answer_a": right if first else wrong,
                    "answer_b": wrong if first else right,
                    "preferred": "a" if first else "b",
                }
            )
    return Dataset.from_list([rows[int(i)] for i in draw.permutation(len(rows))]).train_test_split(
        test_size=0.2, seed=2
    )


def to_pair(row):
    if row["preferred"] == "a":
        chosen, rejected = row["answer_a"], row["answer_b"]
    else:
        chosen, rejected = row["answer_b"], row["answer_a"]
    return {"chosen": f"{row['question']} {chosen}", "rejected": f"{row['question']} {rejected}"}


def make_tokenizer(texts):
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        texts,
        trainers.WordLevelTrainer(vocab_size=1500, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_trainer():
    set_seed(SEED)
    data = load().map(to_pair, remove_columns=["question", "answer_a", "answer_b", "preferred"])
    tokenizer = make_tokenizer(row["chosen"] for row in data["train"])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, max_position_embeddings=64, initializer_range=0.1, num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    args = RewardConfig(
        output_dir="reward-out",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_length=48,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=20,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return RewardTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL accuracy={trainer.evaluate()['eval_accuracy']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
