"""MiMo-V2-Flash: values of another size than keys, and DeepSeek-V3's experts without a shared one in most layers.

Most layers have a window, more KV heads than the others, attention sinks, and a rotary embedding of their own. A window
of so many tokens before a token is one more with the token itself. Layers of multi-token prediction are not loaded.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Linear, Part, Tensors, alike
from srv.models.blueprint.uneven import UnevenAttention
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, Sizes, decoder_sizes, windows_of_types
from srv.models.families.builders.deepseek import feed_forward, sparse_layers
from srv.models.families.builders.sandwich import with_rope_of
from srv.models.families.deepseek_v3 import routing
from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.layers.rope_config import RopeConfig, rope_config
from srv.models.unsupported import UnsupportedConfig, refuse_unless

FULL, SLIDING = "full_attention", "sliding_attention"
PATTERN = 6  # every sixth layer has full attention, and the first one
# Fields of published configurations that the class of transformers does not read; no released model has other values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "n_shared_experts": (0,),
    "add_swa_attention_sink_bias": (True,),
    "add_full_attention_sink_bias": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    _check(config)
    sizes = decoder_sizes(with_rope_of(config, FULL, "rope_theta"), reads=("partial_rotary_factor", *COUNT_FIELDS))
    local = rope_config(with_rope_of(config, SLIDING, "swa_rope_theta"), sizes.head_dim)
    types = config.get("layer_types") or [_kind(index) for index in range(sizes.layers)]
    read = {**config, "routed_scaling_factor": config["routed_scaling_factor"] or 1.0}
    feeding = feed_forward(read, sizes, routing, sparse_layers(config, sizes.layers))
    window = config["sliding_window"]
    if config.get("sliding_window_size") is not None:
        window = int(config["sliding_window_size"]) + 1
    if window is None or window < 1:
        raise UnsupportedConfig(f"sliding_window = {window!r} of layers of {SLIDING} is not a number of tokens")

    def attention(window: int | None) -> Attention:
        return _attention(config, sizes, None if window is None else local, window)

    mixers = alike(windows_of_types(types, sizes.layers, window), attention)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, feeding))


def _check(config: Mapping[str, Any]) -> None:
    """Refuse what published configurations state of layers, if it is not what the fields of transformers state."""
    refuse_unless(config, SUPPORTED)
    layers = range(int(config["num_hidden_layers"]))
    stated = {
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
    }
    if config.get("layer_types") is None:
        stated["hybrid_layer_pattern"] = [int(_kind(index) == SLIDING) for index in layers]
    if config.get("mlp_layer_types") is None:
        stated["moe_layer_freq"] = [int(index >= config["first_k_dense_replace"]) for index in layers]
    refuse_unless(config, {name: (value,) for name, value in stated.items()})


def _kind(index: int) -> str:
    return SLIDING if index and (index + 1) % PATTERN else FULL


def _attention(config: Mapping[str, Any], sizes: Sizes, local: RopeConfig | None, window: int | None) -> Attention:
    """`local`: the rotary embedding of layers with a window; None for that of `sizes`."""
    heads, dim, hidden, bias = sizes.heads, sizes.head_dim, sizes.hidden_size, bool(config["attention_bias"])
    keys, value_dim = sizes.kv_heads * (1 if window is None else 2), int(config["v_head_dim"])
    factor = config["attention_value_scale"]
    return UnevenAttention(
        Linear({"q_proj": heads * dim, "k_proj": keys * dim}, hidden, bias, split="out", unit=dim),
        Linear({"o_proj": hidden}, heads * value_dim, split="in"),
        heads,
        keys,
        dim,
        dim**-0.5,
        local or sizes.rope,
        sinks=None if window is None else Tensors({"sinks": (heads,)}, divided=True),
        window=window,
        values=Linear({"v_proj": keys * value_dim}, hidden, bias, split="out", unit=value_dim),
        value_dim=value_dim,
        value_factor=1.0 if factor is None else float(factor),
        name="self_attn",
    )


ARCHITECTURE = Architecture(
    name="MiMoV2FlashForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 152576,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000000.0,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.334,
        "sliding_window": 129,
        "attention_value_scale": 0.707,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    model_type="mimo_v2_flash",
    weights=(Rename(parts={"attention_sink_bias": "sinks"}),),
    names={"num_local_experts": "n_routed_experts", "layernorm_epsilon": "rms_norm_eps"},
)
