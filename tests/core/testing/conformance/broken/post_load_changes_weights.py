"""After loading, the platform rounds the weights to three mantissa bits, which changes the outputs.

Caught by engine.greedy at L3, naming "greedy output".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_options import rounding
from toy_variant import manifest

if TYPE_CHECKING:
    import torch


def wrong(model: torch.nn.Module) -> bool:
    return True  # the fault


MANIFEST = manifest("post_load_changes_weights", platform=rounding(wrong))
