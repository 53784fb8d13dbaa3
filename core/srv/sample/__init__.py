"""Sampling after forward: logits processors, counter-based noise, the sampling backend, log-probabilities."""
