"""Recipes that read images."""
