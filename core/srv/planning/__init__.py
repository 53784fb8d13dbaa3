"""What `srv plan` computes from facts: the resolution for a target, and the memory budget. Torch-free."""
