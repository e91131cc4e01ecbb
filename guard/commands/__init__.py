"""`trainworthy guard` and `trainworthy watch`."""
