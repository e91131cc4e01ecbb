"""Plain records of a run, and measurements on its tensors, its columns and its output."""
