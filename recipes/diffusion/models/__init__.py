"""Models of these recipes."""
