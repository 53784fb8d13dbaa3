"""After loading, the platform rounds the weights of float16 models, which changes their outputs.

Caught by engine.float16 at L3, naming "output in float16".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_options import rounding
from toy_variant import manifest

if TYPE_CHECKING:
    import torch


def wrong(model: torch.nn.Module) -> bool:
    return any(str(weight.dtype) == "torch.float16" for weight in model.parameters())  # the fault


MANIFEST = manifest("post_load_float16", platform=rounding(wrong))
