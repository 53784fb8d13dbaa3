"""The fallback for models without native layers: causal models of transformers on paged attention."""
