"""One run from start to end: its folder, its stages in order, remembered verdicts, results, several seeds."""
