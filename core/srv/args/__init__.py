"""Server arguments: one declaration per argument, one pure resolution, the provenance of every value. Torch-free."""
