"""Experiments that find why a gate fails: each likely cause is tried, and the one that fits comes first."""
