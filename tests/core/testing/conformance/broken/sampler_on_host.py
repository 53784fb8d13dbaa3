"""The sampled tokens are in host memory, so every step waits for the device.

Caught by sampler.placement at L1, naming "tokens on cpu".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_on_host", sampling="sampler_on_host:sampling")


def sampling(context: BackendContext) -> Any:
    from srv_toy_device.sampling import ToySampling

    class OnHost(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(batch).to("cpu")  # the fault

    return OnHost(context)
