"""The largest sizes that a configuration may have, so that a damaged file cannot cause huge allocations."""

MAX_SIZE = 1 << 28  # of hidden sizes, head counts, vocabularies and contexts
