"""The sampler sees the first 131072 tokens of the vocabulary.

Caught by sampler.exact at L1, naming "262147 tokens, masked below 200000".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_of_131072_tokens", sampling="sampler_of_131072_tokens:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Near(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            beyond = torch.arange(batch.logits.shape[-1], device=batch.logits.device) >= 131072
            kept = batch.logits.masked_fill(beyond, -1e9)  # the fault
            return super().sample(replace(batch, logits=kept))

    return Near(context)
