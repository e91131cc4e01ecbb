"""What a script's source tells without a run: how it is read, and the rules over its syntax tree, each with the fault that it finds."""
