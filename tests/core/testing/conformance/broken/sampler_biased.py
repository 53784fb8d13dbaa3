"""The sampler transforms its noise so that likely tokens are chosen too often.

Caught by sampler.distribution at L1, naming "is biased".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_biased", sampling="sampler_biased:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class Biased(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(replace(batch, uniform=batch.uniform**1.5))  # the fault

    return Biased(context)
