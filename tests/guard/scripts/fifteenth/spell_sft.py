"""Supervised fine-tuning with TRL: prompts "3 4 7 =" and their words as completions, a tiny Llama with random weights and a word tokenizer."""

import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = 0
SMALL = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen").split()  # fmt: skip
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def spell(n):
    if n < 20:
        return [SMALL[n]]
    if n < 100:
        return [TENS[n // 10 - 2]] + ([SMALL[n % 10]] if n % 10 else [])
    if n < 1000:
        return [SMALL[n // 100], "hundred"] + (spell(n % 100) if n % 100 else [])
    return spell(n // 1000) + ["thousand"] + (spell(n % 1000) if n % 1000 else [])


def make_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *"0123456789", "=", *SMALL, *TENS, "hundred", "thousand"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="right"
    )


def rows(numbers):
    return Dataset.from_list(
        [{"prompt": " ".join(str(n)) + " =", "completion": " " + " ".join(spell(n))} for n in numbers]
    )


numbers = random.Random(3).sample(range(10000), 3300)
train_set, val_set = rows(numbers[:3000]), rows(numbers[3000:])
tokenizer = make_tokenizer()


def make_trainer():
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(), num_train_epochs=8, per_device_train_batch_size=32,
        per_device_eval_batch_size=100, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=20,
        completion_only_loss=True, max_length=64, eval_strategy="no", save_strategy="no", report_to=[], seed=SEED,
        use_cpu=True, bf16=False, disable_tqdm=True, logging_steps=100, gradient_checkpointing=False,
    )  # fmt: skip
    return SFTTrainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=train_set, eval_dataset=val_set,
        processing_class=tokenizer,
    )  # fmt: skip


@torch.no_grad()
def exact_match(model):
    model.eval()
    right = 0
    for row in val_set:
        ids = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
        right += tokenizer.decode(made[0, ids.shape[1] :]).split("<eos>")[0].split() == row["completion"].split()
    return right / len(val_set)


def main():
    set_seed(SEED)
    trainer = make_trainer()
    trainer.train()
    print(trainer.evaluate()["eval_loss"])
    print(f"FINAL exact={exact_match(trainer.model):.4f}")


if __name__ == "__main__":
    main()
