"""The scheduler: it chooses the tokens of each request that the next step computes. Imports no torch."""
