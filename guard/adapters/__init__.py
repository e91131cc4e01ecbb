"""The gates and checks for code that is not a recipe: scripts, loops in code, and trainers of transformers and TRL."""
