"""Recipes that answer questions about images."""
