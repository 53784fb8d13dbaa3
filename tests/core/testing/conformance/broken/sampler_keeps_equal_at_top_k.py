"""The sampler compares logits with the k-th largest one, and so keeps more than k tokens if some equal it.

Caught by sampler.top_k at L1, naming "equal at its end".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_keeps_equal_at_top_k", sampling="sampler_keeps_equal_at_top_k:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Threshold(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            size = batch.logits.shape[-1]
            order = batch.logits.sort(-1, descending=True).values
            least = order.gather(-1, (batch.top_k.long() - 1)[:, None])
            kept = torch.where(batch.logits >= least, batch.logits, float("-inf"))  # the fault
            return super().sample(replace(batch, logits=kept, top_k=torch.full_like(batch.top_k, size)))

    return Threshold(context)
