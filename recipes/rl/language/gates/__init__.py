"""Gates and monitors of rl/grpo and rl/rlhf."""
