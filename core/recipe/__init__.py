"""What a recipe is: the `Stage` it fills, how it is found on disk and loaded."""
