"""After loading, the platform halves 8-bit weights without changing their scales.

Caught by engine.w8a8 at L3, naming "output with 8-bit weights".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Halving(toy):  # type: ignore[valid-type, misc]
        def post_load(self, model: torch.nn.Module) -> None:
            import torch

            if not hasattr(model, "lm_head"):
                return  # experts that a check prepares by themselves
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dtype == torch.int8:
                    tensor.data.copy_(tensor.data // 2)  # the fault

    return Halving


MANIFEST = manifest("w8a8_post_load_changes_weights", platform=platform)
