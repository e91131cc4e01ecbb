"""Recipes that generate pictures."""
