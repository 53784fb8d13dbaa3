"""Quantization methods: the registry, and for each method its facts (torch-free) and its layers."""
