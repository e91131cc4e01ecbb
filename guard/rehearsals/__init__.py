"""One rehearsal of a script: a child process with a sandbox, and control over the batches that it gets."""
