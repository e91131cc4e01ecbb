"""What the recipes that train language models from rewards (grpo, rlhf) share."""
