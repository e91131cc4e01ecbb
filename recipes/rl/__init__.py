"""Recipes that learn from rewards: control (ppo, dqn, sac) and language (grpo, rlhf)."""
