"""Rows with a temperature below 0.1 are computed greedily.

Caught by sampler.exact at L1, naming "temperature 0.05".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_greedy_when_cold", sampling="sampler_greedy_when_cold:sampling")


def sampling(context: BackendContext) -> Any:
    from dataclasses import replace

    from srv_toy_device.sampling import ToySampling

    class Cold(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            near_zero = batch.temperature < 0.1
            return super().sample(
                replace(batch, temperature=batch.temperature.masked_fill(near_zero, 0.0))
            )  # the fault

    return Cold(context)
