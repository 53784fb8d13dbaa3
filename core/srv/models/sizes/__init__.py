"""Sizes of models by architecture, from config.json alone: parameters, stored bytes, cache per token. Torch-free."""
