"""Next to sampled rows, greedy rows take the last of equal logits; alone, they take the first.

Caught by sampler.greedy at L1, naming "next to a sampled row".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_last_of_equal_beside_sampled", sampling="sampler_last_of_equal_beside_sampled:sampling")


def sampling(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.sampling import ToySampling

    class LastOfEqual(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            tokens = super().sample(batch)
            if batch.all_greedy:
                return tokens
            last = batch.logits.shape[-1] - 1 - batch.logits.flip(-1).argmax(-1)  # the fault
            return torch.where(batch.temperature > 0, tokens, last)

    return LastOfEqual(context)
