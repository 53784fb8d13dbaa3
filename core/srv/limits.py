"""Limits of every request, whatever the model. Imports nothing, since declarations of arguments read them."""

SMALLEST_REQUEST = 2  # tokens: one of a prompt and one of its answer
MAX_TOKENS = 2**31 - 1  # the limits of the context and the KV pool are checked later
