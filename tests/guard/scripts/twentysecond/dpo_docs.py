"""Preference tuning on docstrings: a tiny GPT-2 first learns the summaries of functions, then DPO teaches it to prefer
the summary as written to one with words in a wrong order."""

# fmt: off
import importlib
import inspect
import os
import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

MODULES = """numpy numpy.ma numpy.linalg scipy.stats scipy.signal scipy.ndimage scipy.special scipy.linalg scipy.optimize scipy.sparse
sklearn.metrics sklearn.utils sklearn.preprocessing sklearn.datasets pandas torch torch.nn.functional os shutil ast inspect random
statistics textwrap shlex tarfile zipfile subprocess threading asyncio email.utils urllib.parse datetime decimal fractions pathlib
argparse logging collections itertools functools transformers.utils datasets accelerate.utils peft torchvision.transforms""".split()


def members(module):
    for name, thing in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(thing):
            continue
        yield name, thing
        if inspect.isclass(thing):
            yield from ((n, t) for n, t in sorted(vars(thing).items()) if not n.startswith("_"))


def summaries():
    found = {}
    for module in MODULES:
        for name, thing in members(importlib.import_module(module)):
            doc = inspect.getdoc(thing) if callable(thing) else None
            line = (doc or "").split("\n\n")[0].replace("\n", " ").strip()
            if 5 <= len(line.split()) <= 16 and line.isascii() and line.endswith("."):
                found.setdefault(line, name)
    return [{"name": name, "line": line} for line, name in found.items()]


def scramble(line, rng):
    """Move two words of the line to other places."""
    words = line.rstrip(".").split()
    while " ".join(words) == line.rstrip("."):
        for _ in range(2):
            words.insert(rng.randrange(len(words)), words.pop(rng.randrange(len(words))))
    return " ".join(words) + "."


def make_pairs(rows, seed):
    rng = random.Random(seed)
    return Dataset.from_list(
        [
            {"prompt": f"def {row['name']} :", "chosen": f" {row['line']}", "rejected": f" {scramble(row['line'], rng)}"}
            for row in rows
        ]
    )


def make_tokenizer(lines):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        lines,
        trainers.BpeTrainer(vocab_size=1000, special_tokens=["<|pad|>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<|pad|>", eos_token="<|end|>", bos_token="<|end|>")


if __name__ == "__main__":
    SEED = int(os.environ.get("SEED", 0))
    set_seed(SEED)
    rows = summaries()
    random.Random(0).shuffle(rows)
    train_rows, test_rows = rows[:1200], rows[1200:1400]
    train_pairs, test_pairs = make_pairs(train_rows, 1), make_pairs(test_rows, 2)
    tokenizer = make_tokenizer([row["line"] for row in train_rows])

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer), n_positions=96, n_embd=64, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )
    common = {
        "per_device_train_batch_size": 16, "save_strategy": "no", "logging_steps": 20, "report_to": "none", "seed": SEED, "max_length": 80,
        "bf16": False, "gradient_checkpointing": False,
    }
    scratch = tempfile.mkdtemp()

    sft = SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=f"{scratch}/sft", learning_rate=3e-3, num_train_epochs=2, completion_only_loss=True, **common),
        train_dataset=train_pairs.select_columns(["prompt", "chosen"]).rename_column("chosen", "completion"),
        processing_class=tokenizer,
    )
    sft.train()

    reference = GPT2LMHeadModel(model.config)
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    dpo_args = DPOConfig(
        output_dir=f"{scratch}/dpo",
        beta=0.2,
        learning_rate=1e-3,
        num_train_epochs=1,
        warmup_steps=10,
        max_grad_norm=1.0,
        per_device_eval_batch_size=32,
        **common,
    )
    dpo = DPOTrainer(
        model=model,
        ref_model=reference,
        args=dpo_args,
        train_dataset=train_pairs,
        eval_dataset=test_pairs,
        processing_class=tokenizer,
    )
    dpo.train()
    metrics = dpo.evaluate()
    print({k: round(v, 3) for k, v in metrics.items() if "rewards" in k or "loss" in k})
    print(f"reward accuracy {metrics['eval_rewards/accuracies']:.4f}")
