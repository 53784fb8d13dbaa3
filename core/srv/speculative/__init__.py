"""Speculative decoding: drafters, which propose tokens for the model to verify. Must not know plans or requests."""
