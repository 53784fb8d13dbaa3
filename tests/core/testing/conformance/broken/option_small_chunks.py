"""With small prompt chunks, the platform prepares weights in another way, which is wrong.

Caught by engine.chunked_prefill at L3, naming "7 tokens at a time".
"""

from __future__ import annotations

from toy_options import spoiled_where

MANIFEST = spoiled_where(
    "option_small_chunks", "chunked_prefill_size", lambda size: isinstance(size, int) and 0 < size < 16
)  # the fault
