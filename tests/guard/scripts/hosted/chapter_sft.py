"""SFT: a small GPT-2 answers which chapter of Python's documentation a sentence is from. TRL, prompts and completions."""

import re
from pydoc_data.topics import topics

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = 0
CHAPTERS = {
    "debugger": "the debugger",
    "formatstrings": "format string syntax",
    "specialnames": "special method names",
    "import": "import system",
    "typesseq": "sequence types and their operations",
    "compound": "compound statements",
}


def load():
    rows, known = [], set()
    for topic, title in CHAPTERS.items():
        for sentence in re.split(r"\.\s|\n\s*\n", topics[topic]):
            prompt = " ".join(re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", sentence)[:20])
            if len(prompt.split()) >= 6 and prompt not in known:
                known.add(prompt)
                rows.append({"prompt": prompt + "\nChapter:", "completion": " " + title})
    return Dataset.from_list(rows).train_test_split(0.25, seed=3)


def make_tokenizer(texts):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1200, special_tokens=["<pad>", "<|endoftext|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<|endoftext|>")


def make_model(tokenizer):
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_trainer():
    set_seed(SEED)
    data = load()
    tokenizer = make_tokenizer([r["prompt"] + r["completion"] for r in data["train"]])
    args = SFTConfig(
        output_dir="sft-out",
        num_train_epochs=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        max_length=128,
        completion_only_loss=True,
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
    return SFTTrainer(
        model=make_model(tokenizer),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )


@torch.no_grad()
def exact_match(model, tokenizer, rows):
    model.eval()
    tokenizer.padding_side = "left"
    right = 0
    for start in range(0, len(rows), 64):
        batch = rows[start : start + 64]
        inputs = tokenizer(batch["prompt"], return_tensors="pt", padding=True)
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=12, do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(answer == wanted for answer, wanted in zip(answers, batch["completion"]))
    return right / len(rows)


def main():
    trainer = make_trainer()
    trainer.train()
    print(f"eval loss {trainer.evaluate()['eval_loss']:.4f}")
    print(f"FINAL exact_match={exact_match(trainer.model, trainer.processing_class, load()['test']):.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
