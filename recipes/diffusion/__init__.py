"""Recipes that generate images."""
