"""Without top-k, the sampler draws among the 256 most likely tokens only.

Caught by sampler.exact at L1, naming "1000 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_of_256_candidates", sampling="sampler_of_256_candidates:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Few(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            least = batch.logits.topk(min(256, batch.logits.shape[-1])).values[:, -1:]
            likely = torch.where(batch.logits >= least, batch.logits, float("-inf"))  # the fault
            chosen = torch.where(batch.top_k[:, None] < batch.logits.shape[-1], batch.logits, likely)
            return super().sample(replace(batch, logits=chosen))

    return Few(context)
