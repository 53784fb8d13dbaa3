"""In a batch with sampled rows, rows of temperature 0 are sampled as if it were 1.

Caught by sampler.greedy at L1, naming "temperature 0".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_greedy_by_noise", sampling="sampler_greedy_by_noise:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Drawing(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            if batch.all_greedy:
                return super().sample(batch)
            temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)  # the fault
            return super().sample(replace(batch, temperature=temperature))

    return Drawing(context)
