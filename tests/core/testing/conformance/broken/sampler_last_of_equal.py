"""The shortcut for greedy rows takes the last of equal logits, and `sample` the first.

Caught by sampler.greedy at L1, naming "by most_likely".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext

MANIFEST = manifest("sampler_last_of_equal", sampling="sampler_last_of_equal:sampling")


def sampling(context: BackendContext) -> Any:
    from srv_toy_device.sampling import ToySampling

    class LastOfEqual(ToySampling):
        def most_likely(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            largest = logits.amax(-1)
            tokens = logits.shape[-1] - 1 - (logits == largest[:, None]).flip(-1).int().argmax(-1)  # the fault
            finite = largest.isfinite() & ~logits.isnan().any(-1)
            return tokens.masked_fill(~finite, 0), finite

    return LastOfEqual(context)
