"""The scheduler: which tokens of which request are computed in the next step. Imports no torch."""
