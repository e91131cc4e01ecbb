"""A search over settings: what is searched, the study that several processes share, its trials, and what it found."""
