"""The sampler keeps what is larger than the first logit after the k largest, and so drops all that equal it.

Caught by sampler.top_k at L1, naming "equal at its end".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_drops_equal_at_top_k", sampling="sampler_drops_equal_at_top_k:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Threshold(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            size = batch.logits.shape[-1]
            order = batch.logits.sort(-1, descending=True).values
            after = order.gather(-1, batch.top_k.long().clamp_max(size - 1)[:, None])
            within = (batch.logits > after) | (batch.top_k >= size)[:, None]  # the fault
            kept = torch.where(within, batch.logits, float("-inf"))
            return super().sample(replace(batch, logits=kept, top_k=torch.full_like(batch.top_k, size)))

    return Threshold(context)
