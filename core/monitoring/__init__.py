"""Writes metrics to disk and to trackers; monitors read them during training."""
