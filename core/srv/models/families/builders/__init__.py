"""What families build their trees with, from the fields of a configuration. Torch-free. Must not know any family."""
