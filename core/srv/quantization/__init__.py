"""Quantization methods: what their checkpoints contain (torch-free), their layers, and the conversion of tensors."""
