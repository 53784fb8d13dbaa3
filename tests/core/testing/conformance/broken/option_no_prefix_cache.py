"""Without a prefix cache, it prepares the weights in another way, and wrongly.

Caught by engine.no_prefix_cache at L3, naming "output without a prefix cache".
"""

from __future__ import annotations

from toy_options import spoiled_where

MANIFEST = spoiled_where("option_no_prefix_cache", "disable_radix_cache", bool)  # the fault
