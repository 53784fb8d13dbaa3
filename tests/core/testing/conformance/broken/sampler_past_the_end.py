"""With noise near 1, the sampler chooses a token after the last one with a probability above 0.

Caught by sampler.extremes at L1, naming "whose probability is 0".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_past_the_end", sampling="sampler_past_the_end:sampling")


def sampling(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.sampling import ToySampling

    class Running(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            end = (batch.uniform > 1 - 2.0**-50) & (batch.temperature > 0)
            return torch.where(end, batch.logits.argmin(-1), super().sample(batch))  # the fault

    return Running(context)
