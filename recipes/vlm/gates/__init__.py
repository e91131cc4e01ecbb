"""Gates of these recipes."""
