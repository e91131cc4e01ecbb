"""LoRA + SFTTrainer on short conversations: which library has a name, and what kind of object is it?

Two turns per conversation; only the assistant's answers are trained on.
"""

# fmt: off
import importlib
import inspect
import os
import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SEED = int(os.environ.get("SEED", 0))
LIBRARIES = {
    "numpy": ["numpy", "numpy.linalg", "numpy.random"],
    "scipy": ["scipy.stats", "scipy.signal", "scipy.special", "scipy.linalg", "scipy.optimize", "scipy.ndimage"],
    "sklearn": ["sklearn.linear_model", "sklearn.ensemble", "sklearn.metrics", "sklearn.preprocessing", "sklearn.datasets", "sklearn.cluster",
                "sklearn.model_selection", "sklearn.decomposition", "sklearn.neighbors", "sklearn.feature_selection", "sklearn.svm"],
    "torch": ["torch", "torch.nn", "torch.optim", "torch.nn.functional"],
}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{% generation %}{{ ' ' + message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


def load_conversations():
    owners = {}
    for library, modules in LIBRARIES.items():
        for module in modules:
            module = importlib.import_module(module)
            for name in dir(module):
                thing = getattr(module, name)
                if name.startswith("_") or not callable(thing):
                    continue
                kind = "a class" if inspect.isclass(thing) else "a function"
                owners.setdefault(name, set()).add((library, kind))
    conversations = []
    for name, found in sorted(owners.items()):
        if len(found) == 1:
            library, kind = next(iter(found))
            conversations.append([
                {"role": "user", "content": f"where is {name} from ?"},
                {"role": "assistant", "content": f"it is in {library}"},
                {"role": "user", "content": "what is it ?"},
                {"role": "assistant", "content": kind},
            ])
    random.Random(5).shuffle(conversations)
    return conversations


def get_tokenizer(conversations):
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Split("_", "isolated")])
    bpe.decoder = decoders.Metaspace(prepend_scheme="never")
    bpe.train_from_iterator(
        (m["content"] for c in conversations for m in c),
        trainers.BpeTrainer(vocab_size=900, special_tokens=["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("user", normalized=False), AddedToken("assistant", normalized=False)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@torch.no_grad()
def answer(model, tokenizer, histories):
    """Greedy answers to a batch of conversations that end with a user's turn."""
    texts = tokenizer.apply_chat_template(histories, tokenize=False, add_generation_prompt=True)
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False, return_token_type_ids=False)
    out = model.generate(**batch, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    new = out[:, batch["input_ids"].shape[1] :]
    return [t.strip() for t in tokenizer.batch_decode(new, skip_special_tokens=True)]


def score(model, tokenizer, conversations):
    model.eval()
    right = []
    for start in range(0, len(conversations), 50):
        part = conversations[start : start + 50]
        for turn in (1, 3):
            guesses = answer(model, tokenizer, [c[:turn] for c in part])
            right += [g == c[turn]["content"] for g, c in zip(guesses, part)]
    return sum(right) / len(right)


def main():
    set_seed(SEED)
    conversations = load_conversations()
    test, train = conversations[:300], conversations[300:]
    tokenizer = get_tokenizer(train)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    )
    args = SFTConfig(
        output_dir="runs/library_chat",
        max_length=56,
        assistant_only_loss=True,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        logging_steps=40,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        report_to="none",
        seed=SEED,
    )
    # the base is new, so that the embeddings and the head are trained in full
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=base, args=args, train_dataset=Dataset.from_list([{"messages": c} for c in train]), processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    model = trainer.model.merge_and_unload()
    print(f"right answers {score(model, tokenizer, test):.4f}")


if __name__ == "__main__":
    main()
