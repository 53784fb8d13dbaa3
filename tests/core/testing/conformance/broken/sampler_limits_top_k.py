"""A top-k above 1024 counts as 1024.

Caught by sampler.top_k at L1, naming "top_k 2500".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_limits_top_k", sampling="sampler_limits_top_k:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class Limiting(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(replace(batch, top_k=batch.top_k.clamp(max=1024)))  # the fault

    return Limiting(context)
