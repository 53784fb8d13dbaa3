"""The sampler computes exp(logit / temperature) without subtracting the largest, and limits it to the largest float32.

Caught by sampler.exact at L1, naming "temperature 0.2".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_overflows", sampling="sampler_overflows:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Overflowing(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)[:, None]
            limit = 88.0  # the fault: the logarithm of the largest float32
            return super().sample(replace(batch, logits=(batch.logits / temperature).clamp_max(limit) * temperature))

    return Overflowing(context)
