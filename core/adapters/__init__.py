"""The loop of transformers' and TRL's trainers, over core's steps."""
