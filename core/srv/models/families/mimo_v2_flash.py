"""MiMo-V2-Flash: values of another size than keys, attention sinks, and experts.

Its sizes alone are known. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Linear, Part, Tensors, alike
from srv.models.blueprint.without_layers import UnevenAttention
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.without_layers import (
    ROUTED,
    SLIDING,
    common,
    deepseek_experts,
    either,
    every,
    kinds,
    sizes,
    sparse_from,
)


def mimo_v2_flash(c: Mapping[str, Any]) -> Part:
    """Layers with a window have more KV heads, and attention sinks."""
    types = kinds(c, lambda index: "full_attention" if index == 0 else every(6)(index))
    base = sizes(c)
    value_dim, bias = c["v_head_dim"] or base.head_dim, bool(c["attention_bias"])

    def mixer(slides: bool) -> Attention:
        return _uneven(base, value_dim, c["sliding_window"] if slides else None, bias, slides)

    mixers = alike((kind == SLIDING for kind in types), mixer)
    feeding = either(base, deepseek_experts(c, base), sparse_from(c, 1))
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


def _uneven(base: Sizes, value_dim: int, window: int | None, bias: bool, slides: bool) -> Attention:
    heads, keys, dim = base.heads, base.kv_heads * (2 if slides else 1), base.head_dim
    rows = {"q_proj": heads * dim, "k_proj": keys * dim, "v_proj": keys * value_dim}
    sinks = Tensors({"sinks": (heads,)}, divided=True) if slides else None
    output = Linear({"o_proj": base.hidden_size}, heads * value_dim, split="in")
    return UnevenAttention(
        Linear(rows, base.hidden_size, bias, split="out", unit=dim), output, heads, keys, dim, dim**-0.5,
        base.rope, sinks=sinks, window=window, name="self_attn", value_dim=value_dim,
    )  # fmt: skip


ARCHITECTURE = Architecture(
    name="MiMoV2FlashForCausalLM",
    tree=mimo_v2_flash,
    defaults=common(
        152576,
        4096,
        16384,
        48,
        64,
        4,
        131072,
        head_dim=192,
        v_head_dim=128,
        sliding_window=129,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
    ),
    layers=None,
    model_type="mimo_v2_flash",
    names=ROUTED,
)
