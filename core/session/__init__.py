"""The life of a run: its folder, stages in a row, remembered verdicts, results, several seeds."""
