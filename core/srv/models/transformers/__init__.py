"""The generic path: causal models of transformers on paged attention."""
