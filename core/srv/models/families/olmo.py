"""OLMo: norms without weights. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Norm, Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.without_layers import EPS, common, sizes


def olmo(c: Mapping[str, Any]) -> Part:
    """Its norms have no weights."""
    base = sizes(c)
    norm = Norm(base.hidden_size, EPS, rms=False, learned=False)
    layer = Layer((norm,), (parts.attention(base, bias=bool(c["attention_bias"])),), (norm,), parts.mlp(base))
    return parts.decoder(base, (layer,) * base.layers, norm)


ARCHITECTURE = Architecture(
    name="OlmoForCausalLM",
    tree=olmo,
    defaults=common(50304, 4096, 11008, 32, 32, None, 2048),
    layers=None,
    model_type="olmo",
)
