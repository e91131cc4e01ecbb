"""Measurements on trainers of transformers and TRL: tokens, columns, counts, scores."""
