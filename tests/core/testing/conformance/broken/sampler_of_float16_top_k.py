"""A sampling backend that fits models in float16 only keeps one token more than top-k.

Caught by sampler.top_k at L1, naming "of_float16".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_roles import with_sampling_of_float16

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = with_sampling_of_float16("sampler_of_float16_top_k", "sampler_of_float16_top_k:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class OneMore(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            return super().sample(replace(batch, top_k=batch.top_k + 1))  # the fault

    return OneMore(context)
