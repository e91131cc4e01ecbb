"""The gates for code that is not a recipe: plain scripts, and trainers of transformers and TRL."""
