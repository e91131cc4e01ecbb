"""Guards for any training script: watched from below, in rehearsals, without a line changed."""
