"""DPO with LoRA: prefer the right chapter of Python's documentation for a sentence to a wrong one. TRL and peft."""

import random
import re
from pydoc_data.topics import topics

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

SEED = 0
CHAPTERS = {"debugger": "debugger", "formatstrings": "formatting", "specialnames": "methods", "import": "import"}


def load():
    draw = random.Random(2)
    rows, known = [], set()
    for topic, title in CHAPTERS.items():
        for sentence in re.split(r"\.\s|\n\s*\n", topics[topic]):
            words = re.findall(r"[a-z_]+", sentence.lower())
            prompt = " ".join(words[:20])
            if len(words) >= 6 and prompt not in known:
                known.add(prompt)
                wrong = draw.choice([t for t in CHAPTERS.values() if t != title])
                rows.append(
                    {
                        "prompt": f"{prompt} belongs to",
                        "chosen": f" the chapter on {title}",
                        "rejected": f" the chapter on {wrong}",
                    }
                )
    return Dataset.from_list(rows).train_test_split(0.25, seed=3)


def make_tokenizer(texts):
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.train_from_iterator(
        texts,
        trainers.WordLevelTrainer(vocab_size=2000, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def make_trainer():
    set_seed(SEED)
    data = load()
    tokenizer = make_tokenizer(r["prompt"] + r["chosen"] for r in data["train"])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, max_position_embeddings=64, initializer_range=0.1, bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    args = DPOConfig(
        output_dir="dpo-out",
        beta=0.3,
        max_length=40,
        num_train_epochs=3,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=10,
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    return DPOTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"FINAL reward_accuracy={trainer.evaluate()['eval_rewards/accuracies']:.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
