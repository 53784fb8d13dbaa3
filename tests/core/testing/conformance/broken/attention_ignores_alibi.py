"""The spec has the trait alibi, but attention adds no position biases.

Caught by attention.alibi at L2, naming "linear position biases".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toy_variant import backends, manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionLayer, BackendContext

SPECS = {
    family: tuple(dataclasses.replace(spec, traits=(*spec.traits, "alibi")) for spec in specs)
    if family == "attention"
    else specs
    for family, specs in backends(attention="attention_ignores_alibi:attention").items()
}
MANIFEST = manifest("attention_ignores_alibi", facts={"backends": SPECS})


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class Unbiased(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> str | None:
            return super().supports(dataclasses.replace(layer, alibi=None))  # the fault: forward ignores it

    return Unbiased(context)
