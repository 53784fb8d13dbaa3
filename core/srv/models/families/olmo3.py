"""OLMo 3: OLMo 2 with a window in all but every fourth layer. RoPE is scaled in layers with full attention alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import decoder_sizes, windows_of_pattern
from srv.models.families.builders.sandwich import local_rope, sandwich_decoder, with_rope_of
from srv.models.families.olmo2 import OLMO_DEFAULTS


def tree(config: Mapping[str, Any]) -> Part:
    sizes = decoder_sizes(with_rope_of(config, "full_attention", "rope_theta"))
    local, norms = local_rope(config, sizes.head_dim, "rope_theta"), parts.joint_norms(sizes)

    def attention(window: int | None) -> Attention:
        rope = None if window is None else local
        return parts.attention(sizes, bias=bool(config["attention_bias"]), norms=norms, rope=rope, window=window)

    mixers = alike(windows_of_pattern(config, sizes.layers), attention)
    return sandwich_decoder(sizes, mixers, parts.mlp(sizes), before=False)


ARCHITECTURE = Architecture(
    name="Olmo3ForCausalLM",
    tree=tree,
    defaults={**OLMO_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
)
