"""Measurements on what losses get: predictions, targets and weights, and how the terms of a loss act."""
