"""Bookkeeping of KV pages: allocators, the prefix tree, and the cache that joins them. Plain Python, no tensors."""
