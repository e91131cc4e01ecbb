"""GRPO: a tiny Llama learns to answer with the given word's class, rewarded for each right token. TRL, rewards from a column."""

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

SEED = 0
CLASSES = {
    "metal": ["iron", "copper", "gold", "silver", "lead", "nickel"],
    "animal": ["dog", "horse", "cow", "sheep", "goat", "cat"],
    "colour": ["red", "green", "blue", "black", "white", "brown"],
}
WORDS = ["<pad>", "</s>", "<unk>", "name", "a", "kind", "of", *CLASSES, *(w for some in CLASSES.values() for w in some)]
LENGTH = 4


def load(n=256):
    draw = np.random.default_rng(7)
    rows = []
    for _ in range(n):
        kind = str(draw.choice(list(CLASSES)))
        rows.append({"prompt": f"{draw.choice(CLASSES[kind])} a kind of", "solution": kind})
    return Dataset.from_list(rows)


def make_tokenizer():
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
    )


def share_of_right_words(completions, solution, **kwargs):
    """Share of a completion's words that are the right class."""
    return [text.split().count(wanted) / LENGTH for text, wanted in zip(completions, solution)]


def make_trainer():
    set_seed(SEED)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64, max_position_embeddings=32, initializer_range=0.1, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    args = GRPOConfig(
        output_dir="grpo-out",
        max_steps=60,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=LENGTH,
        temperature=1.0,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        beta=0.0,
        logging_steps=10,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return GRPOTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        reward_funcs=share_of_right_words,
        train_dataset=load(),
        processing_class=tokenizer,
    )


@torch.no_grad()
def right_words(model, tokenizer):
    model.eval()
    total, n = 0.0, 0
    for kind, words in CLASSES.items():
        inputs = tokenizer([f"{word} a kind of" for word in words], return_tensors="pt")
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=LENGTH, do_sample=False,
        )  # fmt: skip
        for text in tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
            total += text.split().count(kind) / LENGTH
            n += 1
    return total / n


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL right_words={right_words(trainer.model, trainer.processing_class):.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
