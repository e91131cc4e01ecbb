"""Recipes that read pictures."""
