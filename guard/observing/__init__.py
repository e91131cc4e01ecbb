"""Observers: they get the events of a running script and keep what the checks need."""
