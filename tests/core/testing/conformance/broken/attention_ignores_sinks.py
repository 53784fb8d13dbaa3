"""The spec has the trait sinks, but attention has no score of a sink in its softmax.

Caught by attention.sinks at L2, naming "attention sinks".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toy_variant import backends, manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionLayer, BackendContext

SPECS = {
    family: tuple(dataclasses.replace(spec, traits=(*spec.traits, "sinks")) for spec in specs)
    if family == "attention"
    else specs
    for family, specs in backends(attention="attention_ignores_sinks:attention").items()
}
MANIFEST = manifest("attention_ignores_sinks", facts={"backends": SPECS})


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class WithoutSinks(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> str | None:
            return super().supports(
                dataclasses.replace(layer, sinks=False, sink_scores=None)
            )  # the fault: forward ignores it

    return WithoutSinks(context)
