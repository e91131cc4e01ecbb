"""Recipes that distil a teacher into a student."""
