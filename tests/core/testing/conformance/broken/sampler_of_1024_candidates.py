"""Without top-k too, the sampler draws among the 1024 most likely tokens.

Caught by sampler.exact at L1, naming "262147 tokens without top-k".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_of_1024_candidates", sampling="sampler_of_1024_candidates:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Candidates(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            count = min(1024, batch.logits.shape[-1])
            least = batch.logits.topk(count).values[:, -1:]
            kept = torch.where(batch.logits >= least, batch.logits, float("-inf"))  # the fault
            return super().sample(replace(batch, logits=kept))

    return Candidates(context)
