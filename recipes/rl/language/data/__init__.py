"""Questions, prompts and rewards of the recipes that train language models on rewards."""
