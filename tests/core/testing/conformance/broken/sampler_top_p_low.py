"""The sampler keeps tokens up to four fifths of top-p.

Caught by sampler.top_p at L1, naming "top_p".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_top_p_low", sampling="sampler_top_p_low:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    import torch

    from srv_toy_device.sampling import ToySampling

    class Low(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            top_p = torch.where(batch.top_p < 1, batch.top_p * 0.8, batch.top_p)  # the fault
            return super().sample(replace(batch, top_p=top_p))

    return Low(context)
