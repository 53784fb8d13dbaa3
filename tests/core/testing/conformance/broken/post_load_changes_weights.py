"""After loading, the platform rounds the weights to three mantissa bits, which changes the outputs.

Caught by engine.greedy at L3, naming "greedy output".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Rounding(toy):  # type: ignore[valid-type, misc]
        def post_load(self, model: torch.nn.Module) -> None:
            for weight in model.parameters():
                weight.data.copy_((weight.data * 8).round() / 8)  # the fault

    return Rounding


MANIFEST = manifest("post_load_changes_weights", platform=platform)
