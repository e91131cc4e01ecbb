"""SFT of a chat: the user names a Unicode character, the assistant answers with its category. TRL, loss on the assistant's turns."""

import unicodedata

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = 0
CATEGORIES = {
    "Lu": "an uppercase letter",
    "Ll": "a lowercase letter",
    "Lo": "some other letter",
    "Mn": "a mark without width",
    "Nd": "a decimal digit",
    "So": "a symbol of no other kind",
    "Sm": "a symbol of mathematics",
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<user> ' + message['content'] + ' ' }}"
    "{% else %}{{ '<assistant> ' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def load():
    by = {code: [] for code in CATEGORIES}
    for i in range(0x80, 0x11000):
        name, code = unicodedata.name(chr(i), ""), unicodedata.category(chr(i))
        if name and code in by and "SYLLABLE" not in name and "IDEOGRAPH" not in name:
            by[code].append({"from": "human", "value": name.lower()} | {"answer": CATEGORIES[code]})
    draw = np.random.default_rng(3)
    rows = [row for some in by.values() for row in draw.permutation(np.array(some, dtype=object))[:200]]
    talks = [
        [{"from": "human", "value": row["value"]}, {"from": "gpt", "value": row["answer"]}]
        for row in draw.permutation(rows)
    ]
    return Dataset.from_dict({"conversations": talks}).train_test_split(test_size=0.2, seed=2)


def to_messages(row):
    roles = {"human": "user", "gpt": "assistant"}
    return {"messages": [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]}


def make_tokenizer(texts):
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<unk>", "<pad>", "<s>", "</s>", "<user>", "<assistant>"]
    inner.train_from_iterator(
        texts, trainers.WordLevelTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        chat_template=TEMPLATE, padding_side="left",
    )  # fmt: skip


def make_trainer():
    set_seed(SEED)
    data = load().map(to_messages, remove_columns=["conversations"])
    tokenizer = make_tokenizer(turn["content"] for row in data["train"] for turn in row["messages"])
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, max_position_embeddings=64, initializer_range=0.1, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    args = SFTConfig(
        output_dir="chat-out",
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_length=48,
        assistant_only_loss=True,
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
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )


@torch.no_grad()
def exact_match(model, tokenizer, rows):
    model.eval()
    right = 0
    for row in rows:
        user, wanted = row["messages"]
        text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=9, do_sample=False,
        )  # fmt: skip
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += answer.split() == wanted["content"].split()
    return right / len(rows)


def main():
    trainer = make_trainer()
    trainer.train()
    test = load()["test"].map(to_messages)
    print(f"FINAL exact_match={exact_match(trainer.model, trainer.processing_class, test):.4f}")
    return trainer


if __name__ == "__main__":
    trainer = main()
