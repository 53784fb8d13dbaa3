"""Where a small pool is asked for, it prepares the weights in another way, and wrongly.

Caught by engine.retraction at L3, naming "output of requests that were retracted".
"""

from __future__ import annotations

from toy_options import spoiled_where

MANIFEST = spoiled_where(  # the fault
    "option_small_pool", "max_total_tokens", lambda tokens: isinstance(tokens, int) and tokens < 1024
)
