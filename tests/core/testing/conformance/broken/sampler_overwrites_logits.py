"""Greedy sampling replaces the logits with probabilities in place, before log-probabilities are computed.

Caught by engine.logprobs at L3, naming "has log-probability".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_overwrites_logits", sampling="sampler_overwrites_logits:sampling")


def sampling(context: BackendContext) -> Any:
    from srv_toy_device.sampling import ToySampling

    class Overwriting(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            tokens = super().sample(batch)
            if batch.all_greedy:
                batch.logits.copy_(batch.logits.softmax(dim=-1))  # the fault
            return tokens

    return Overwriting(context)
