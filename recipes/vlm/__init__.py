"""Recipes that answer questions about pictures."""
