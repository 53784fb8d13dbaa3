"""Without a prefix cache, the platform prepares weights in another way, which is wrong.

Caught by engine.no_prefix_cache at L3, naming "output without a prefix cache".
"""

from __future__ import annotations

from toy_options import spoiled_where

MANIFEST = spoiled_where("option_no_prefix_cache", "disable_radix_cache", bool)  # the fault
