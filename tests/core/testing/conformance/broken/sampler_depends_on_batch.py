"""The sampler applies the largest top-k of the batch to every row, including rows without top-k.

Caught by sampler.batch at L1, naming "in a batch".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_depends_on_batch", sampling="sampler_depends_on_batch:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class Cutting(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            if not batch.any_top_k:
                return super().sample(batch)
            return super().sample(replace(batch, top_k=batch.top_k.clamp(max=batch.largest_top_k)))  # the fault

    return Cutting(context)
