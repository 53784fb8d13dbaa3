"""The sampler does not apply the min-p filter.

Caught by sampler.min_p at L1, naming "min_p".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_ignores_min_p", sampling="sampler_ignores_min_p:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class Lenient(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(replace(batch, any_min_p=False))  # the fault

    return Lenient(context)
