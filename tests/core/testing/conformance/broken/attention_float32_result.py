"""The result of attention is float32 for queries of any dtype.

Caught by attention.dtypes at L2, naming "torch.float32".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_float32_result", attention="attention_float32_result:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class Wide(ToyPagedAttention):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs).float()  # the fault

    return Wide(context)
