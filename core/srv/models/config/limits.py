"""The largest sizes that a configuration may claim: a damaged file must not make us allocate by its numbers."""

MAX_LAYERS = 10_000
MAX_SIZE = 1 << 28  # of any width, count of heads, vocabulary or context
