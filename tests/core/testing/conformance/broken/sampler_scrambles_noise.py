"""The sampler permutes the engine's noise: tokens have the right frequencies, but not the right order.

Caught by sampler.exact at L1, naming "intervals".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_scrambles_noise", sampling="sampler_scrambles_noise:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class Scrambling(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(replace(batch, uniform=(batch.uniform * 997) % 1))  # the fault

    return Scrambling(context)
