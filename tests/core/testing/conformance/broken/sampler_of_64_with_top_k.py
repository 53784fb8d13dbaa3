"""With top-k, the sampler draws among the 64 most likely tokens at most.

Caught by sampler.top_k at L1, naming "top_k 300".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_of_64_with_top_k", sampling="sampler_of_64_with_top_k:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Few(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            limited = batch.top_k < batch.logits.shape[-1]
            return super().sample(replace(batch, top_k=torch.where(limited, batch.top_k.clamp_max(64), batch.top_k)))

    return Few(context)
