"""Data of these recipes."""
