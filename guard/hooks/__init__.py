"""What torch is made to report: functions that are patched, and the events that come of them."""
