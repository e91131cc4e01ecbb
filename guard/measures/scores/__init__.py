"""Measurements on the scores that a script prints."""
