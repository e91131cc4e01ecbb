"""Metrics on disk and in trackers, and the monitors that read them while a run trains."""
