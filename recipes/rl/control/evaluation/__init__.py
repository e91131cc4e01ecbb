"""Evaluation episodes: playing them, their metrics, and pictures of them."""
