"""Attention computes prompts wrongly beside a backend that computes output rightly, which is not to blame.

Caught by attention.single_page at L2, naming "toy_paged (prefill)".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toy_roles import DECODE
from toy_variant import backends, manifest

from srv.platform.facts import BackendSpec, Requires, ResolutionContext
from srv_toy_device.facts import KV_ORDER
from srv_toy_device.limits import TRAITS

if TYPE_CHECKING:
    from srv.platform.interface import BackendContext

_OWN = backends(attention="attention_beside_a_right_one:attention")


def check(context: ResolutionContext) -> Requires:
    return Requires(slots=(DECODE,))


_RIGHT = BackendSpec(
    "of_output", 20, check, "srv_toy_device.attention:ToyPagedAttention", kv_order=KV_ORDER, graphs=True, traits=TRAITS
)
MANIFEST = manifest(
    "attention_beside_a_right_one", facts={"backends": {**_OWN, "attention": (_RIGHT, *_OWN["attention"])}}
)


def attention(context: BackendContext) -> Any:
    import torch

    from srv.platform.interface import AttentionLayer
    from srv_toy_device.attention import GraphMetadata, ToyPagedAttention

    class WrongPrompts(ToyPagedAttention):
        def forward(
            self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any
        ) -> torch.Tensor:
            out = super().forward(layer, q, k, v, metadata)
            if not isinstance(metadata, GraphMetadata):
                for tile in metadata.tiles:
                    out[tile.tokens] *= 1 if tile.queries == 1 else 2  # the fault
            return out

    return WrongPrompts(context)
