"""Every batch of a size gets its tokens in the same tensor.

Caught by sampler.placement at L1, naming "overwritten".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBackend, SamplingBatch


def sampling(context: BackendContext) -> SamplingBackend:
    from srv_toy_device.sampling import ToySampling

    class Reusing(ToySampling):
        def __init__(self, context: BackendContext) -> None:
            super().__init__(context)
            self._results: dict[int, torch.Tensor] = {}

        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            tokens = super().sample(batch)
            kept = self._results.setdefault(len(tokens), tokens)
            return kept.copy_(tokens)  # the fault

    return Reusing(context)


MANIFEST = manifest("sampler_reuses_result", sampling="sampler_reuses_result:sampling")
