"""With a small pool, the platform prepares weights in another way, which is wrong.

Caught by engine.retraction at L3, naming "output of requests that were retracted".
"""

from __future__ import annotations

from toy_options import spoiled_where

MANIFEST = spoiled_where(  # the fault
    "option_small_pool", "max_total_tokens", lambda tokens: isinstance(tokens, int) and tokens < 1024
)
