"""Model facts from `config.json` and from GGUF metadata. Torch-free."""
