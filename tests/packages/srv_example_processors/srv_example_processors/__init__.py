"""Two logit processors: one that allows a single token, and one that always fails."""
