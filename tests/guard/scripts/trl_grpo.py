"""TRL's GRPOTrainer with a reward function, as its documentation starts it, with a small random model from a config."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

set_seed(0)
words = ["<pad>", "</s>", "<unk>", "say", "more", *[f"w{i}" for i in range(20)]]
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left"
)
data = Dataset.from_list([{"prompt": f"say w{i % 20} more"} for i in range(200)])
config = LlamaConfig(
    vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=64, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
)  # fmt: skip


def reward_even(completions, **kwargs):
    """The share of even words."""
    found = [[w for w in c.split() if w.startswith("w")] for c in completions]
    return [sum(int(w[1:]) % 2 == 0 for w in ws) / 8 for ws in found]


args = GRPOConfig(
    "grpo-out", per_device_train_batch_size=16, num_generations=8, max_completion_length=8, learning_rate=1e-3,
    num_train_epochs=1, logging_steps=5, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
    gradient_checkpointing=False, seed=0,
)  # fmt: skip
trainer = GRPOTrainer(
    model=LlamaForCausalLM(config), reward_funcs=reward_even, args=args, train_dataset=data, processing_class=tokenizer,
)  # fmt: skip
trainer.train()
print("reward", [round(row["reward"], 2) for row in trainer.state.log_history if "reward" in row])
