"""The spec has the trait temperature, but attention does not sharpen scores with the position.

Caught by attention.temperature at L2, naming "scores that grow with the position".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from toy_variant import backends, manifest

if TYPE_CHECKING:
    from srv.platform.interface import AttentionLayer, BackendContext

SPECS = {
    family: tuple(dataclasses.replace(spec, traits=(*spec.traits, "temperature")) for spec in specs)
    if family == "attention"
    else specs
    for family, specs in backends(attention="attention_ignores_temperature:attention").items()
}
MANIFEST = manifest("attention_ignores_temperature", facts={"backends": SPECS})


def attention(context: BackendContext) -> Any:
    from srv_toy_device.attention import ToyPagedAttention

    class Unsharpened(ToyPagedAttention):
        def supports(self, layer: AttentionLayer) -> str | None:
            return super().supports(dataclasses.replace(layer, temperature_from=None))  # the fault: forward ignores it

    return Unsharpened(context)
