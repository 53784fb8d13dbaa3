"""From plan rows to input tensors, forward, sampled tokens. Knows torch, asks the platform for the rest."""
