"""TRL's SFTTrainer on prompts and completions, as its documentation starts it, with a small random model from a config."""

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
rng = np.random.default_rng(0)
words = [
    "<pad>",
    "</s>",
    "<unk>",
    "red",
    "green",
    "blue",
    "white",
    "black",
    "item",
    "has",
    "colour",
    *map(str, range(60)),
]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def row():
    n = int(rng.integers(60))
    return {"prompt": f"item {n} has colour ", "completion": words[3 + n % 5]}


data = Dataset.from_list([row() for _ in range(480)]).train_test_split(0.2, seed=0)
config = LlamaConfig(
    vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=64, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
)  # fmt: skip
args = SFTConfig(
    "sft-out", per_device_train_batch_size=16, num_train_epochs=3, learning_rate=5e-3, eval_strategy="epoch",
    save_strategy="no", logging_steps=10, report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, seed=0,
)  # fmt: skip
trainer = SFTTrainer(
    model=LlamaForCausalLM(config), args=args, train_dataset=data["train"], eval_dataset=data["test"],
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
print(trainer.evaluate())
