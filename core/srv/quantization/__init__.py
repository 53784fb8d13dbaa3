"""Quantization: the schemes of weights and their layers, and the formats of checkpoints."""
