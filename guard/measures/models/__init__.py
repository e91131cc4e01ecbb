"""Measurements on models: masks, states, averages of weights, rows of their inputs, gradients."""
