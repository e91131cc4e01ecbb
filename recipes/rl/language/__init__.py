"""Code shared by the recipes that train language models on rewards (grpo, rlhf)."""
