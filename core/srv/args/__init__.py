"""Server arguments: one declaration each, one pure resolution, a story for every value. Torch-free."""
