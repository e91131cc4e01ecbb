"""Planted bugs, healthy variants and mutants of recipes, run through the gates, and what came of them."""
