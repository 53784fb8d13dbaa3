"""K-EXAONE: EXAONE 4's attention, with norms of heads and windows, and DeepSeek-V3's experts from some layer on.

Only layers with a window rotate, if any layer has one. Torch-free. Layers of multi-token prediction are not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Attention, Part, alike
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, windows_of_pattern
from srv.models.families.builders.deepseek import feed_forward, sparse_layers
from srv.models.families.deepseek_v3 import routing
from srv.models.layers.moe_config import COUNT_FIELDS
from srv.models.unsupported import UnsupportedConfig, refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "attention_bias": (False,)})
    sizes = decoder_sizes(config, reads=COUNT_FIELDS)
    read = {**config, "n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    feeding, norms = feed_forward(read, sizes, routing, sparse_layers(config, sizes.layers)), parts.head_norms(sizes)
    windowed = config["sliding_window"] is not None

    def attention(window: int | None) -> Attention:
        return parts.attention(sizes, norms=norms, window=window, rotated=window is not None or not windowed)

    mixers = alike(_windows(config, sizes.layers) if windowed else (None,) * sizes.layers, attention)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, feeding))


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """A pattern of letters, as in published configurations, is beside `layer_types`."""
    pattern = config["sliding_window_pattern"]
    if config.get("layer_types") is None and not isinstance(pattern, int):
        raise UnsupportedConfig(f"sliding_window_pattern = {pattern!r} without layer_types is not implemented natively")
    return windows_of_pattern(config, layers)


ARCHITECTURE = Architecture(
    name="ExaoneMoeForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 53,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    model_type="exaone_moe",
    published_names=("ExaoneMoEForCausalLM",),
    weights=(
        Rename({"model.layers.*.mlp.e_score_correction_bias": "model.layers.*.mlp.gate.e_score_correction_bias"}),
    ),
)
