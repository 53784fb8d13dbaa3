"""The spec has the trait chunks, but tokens attend to all chunks.

Caught by attention.chunks at L2, naming "attention within chunks".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toy_variant import backends, manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionLayer, BackendContext

SPECS = {
    family: tuple(dataclasses.replace(spec, traits=(*spec.traits, "chunks")) for spec in specs)
    if family == "attention"
    else specs
    for family, specs in backends(attention="attention_ignores_chunks:attention").items()
}
MANIFEST = manifest("attention_ignores_chunks", facts={"backends": SPECS})


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class WithoutChunks(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> str | None:
            return super().supports(dataclasses.replace(layer, chunk=None))  # the fault: forward ignores it

    return WithoutChunks(context)
