"""The sampler keeps one token more than top-k.

Caught by sampler.top_k at L1, naming "top_k".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_top_k_off_by_one", sampling="sampler_top_k_off_by_one:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class OneMore(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(replace(batch, top_k=batch.top_k + 1))  # the fault

    return OneMore(context)
