"""The training loop: steps, updates, optimisers, schedules, EMA, checkpoints, starting weights, export."""
