"""The gates for code that is not a recipe: plain scripts and the trainers of transformers and TRL."""
