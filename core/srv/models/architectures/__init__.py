"""Model architectures with native layers: their configurations and their computation."""
