"""The sampler keeps the ids of sorted tokens in 16 bits, which large vocabularies do not fit.

Caught by sampler.exact at L1, naming "70001 tokens".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext, SamplingBatch

MANIFEST = manifest("sampler_ids_of_16_bits", sampling="sampler_ids_of_16_bits:sampling")


def sampling(context: BackendContext) -> Any:
    import torch

    from srv_toy_device.sampling import ToySampling

    class Short(ToySampling):
        def sample(self, batch: SamplingBatch) -> torch.Tensor:
            tokens = super().sample(batch)
            if batch.all_greedy:
                return tokens
            return torch.where(batch.temperature > 0, tokens % 65536, tokens)  # the fault

    return Short(context)
