"""Metrics of answers to held-out questions."""
