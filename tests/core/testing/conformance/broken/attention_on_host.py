"""The result of attention is in host memory.

Caught by attention.placement at L2, naming "result on cpu".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_variant import manifest

if TYPE_CHECKING:
    import torch

    from srv.platform.interface import BackendContext

MANIFEST = manifest("attention_on_host", attention="attention_on_host:attention")


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class OnHost(ToyPagedAttention):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().forward(*args, **kwargs).to("cpu")  # the fault

    return OnHost(context)
