"""What every other room uses: errors and exit codes, console, settings, seeds, the machine, verdicts."""
