"""Models: facts from headers (no torch), layers and architectures, loaders, tokenizers."""
