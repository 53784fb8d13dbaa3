"""If steps do not overlap, the platform prepares weights in another way, which is wrong.

Caught by engine.no_overlap at L3, naming "output without overlap".
"""

from __future__ import annotations

from toy_options import spoiled_where

MANIFEST = spoiled_where("option_no_overlap", "disable_overlap_schedule", bool)  # the fault
