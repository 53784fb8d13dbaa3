"""After loading, experts get a kernel that adds their results without weights.

Caught by experts.loaded at L2, naming "after post_load".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from srv.models.layers.experts import ExpertWeights
    from srv_toy_device.platform import ToyPlatform


def platform(toy: type[ToyPlatform]) -> type[ToyPlatform]:
    class Unweighted(toy):  # type: ignore[valid-type, misc]
        def post_load(self, model: torch.nn.Module) -> None:
            from srv.models.layers.experts import ExpertWeights

            for layer in model.modules():
                if isinstance(layer, ExpertWeights):
                    layer.kernel = _unweighted(layer)

    return Unweighted


def _unweighted(layer: ExpertWeights) -> object:
    def kernel(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return layer.compute(x, ids, weights * 0 + 1)  # the fault

    return kernel


MANIFEST = manifest("post_load_experts_unweighted", platform=platform)
