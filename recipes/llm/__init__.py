"""Recipes that train language models."""
