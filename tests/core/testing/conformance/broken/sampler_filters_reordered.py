"""The sampler applies top-p before top-k, on probabilities that top-k has not limited yet.

Caught by sampler.filter_order at L1, naming "top_k".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_filters_reordered", sampling="sampler_filters_reordered:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Reordered(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            if not (batch.any_top_k and batch.any_top_p):
                return super().sample(batch)
            scaled = batch.logits.double() / batch.temperature.clamp(min=1e-6)[:, None]
            shares, order = scaled.softmax(-1).sort(-1, descending=True)
            dropped = (shares.cumsum(-1) - shares >= batch.top_p.double()[:, None]).gather(-1, order.argsort(-1))
            logits = batch.logits.masked_fill(dropped, float("-inf"))
            return super().sample(replace(batch, logits=logits, any_top_p=False))  # the fault

    return Reordered(context)
