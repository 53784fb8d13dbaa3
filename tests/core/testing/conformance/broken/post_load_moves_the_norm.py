"""After loading, the platform moves the weight of the last norm into the output layer: logits are right, hidden states
are not.

Caught by engine.embeddings at L3, naming "the embedding".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Moving(toy):  # type: ignore[valid-type, misc]
        def post_load(self, model: Any) -> None:
            if not hasattr(model, "norm"):
                return  # experts that a check prepares by themselves
            weight, kernel = model.norm.weight.data.clone(), model.lm_head.kernel

            def scaled(hidden: torch.Tensor) -> torch.Tensor:
                return kernel(hidden * weight)  # type: ignore[no-any-return]

            model.lm_head.kernel = scaled
            model.norm.weight.data.fill_(1.0)  # the fault

    return Moving


MANIFEST = manifest("post_load_moves_the_norm", platform=platform)
