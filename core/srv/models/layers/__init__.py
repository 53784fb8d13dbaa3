"""The layers that model architectures are built from."""
