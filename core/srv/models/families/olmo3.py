"""OLMo 3: as OLMo 2, with a window in most layers. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.sandwich import sandwich_decoder
from srv.models.families.builders.without_layers import attention_of_layers, common, every, sizes, windows


def olmo3(c: Mapping[str, Any]) -> Part:
    """As OLMo 2; all but every fourth layer have a window."""
    base = sizes(c)
    mixers = attention_of_layers(
        base, windows(c, every(4)), norms=parts.joint_norms(base), bias=bool(c["attention_bias"])
    )
    return sandwich_decoder(base, mixers, parts.mlp(base), before=False)


ARCHITECTURE = Architecture(
    name="Olmo3ForCausalLM",
    tree=olmo3,
    defaults=common(50304, 4096, 11008, 32, 32, None, 2048, sliding_window=4096),
    layers=None,
    model_type="olmo3",
)
