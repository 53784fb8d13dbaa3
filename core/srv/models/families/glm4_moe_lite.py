"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, with experts in all layers but the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.deepseek import DEFAULTS, WEIGHTS, deepseek_sizes, feed_forward, sparse_layers
from srv.models.families.builders.latent import latent_attention
from srv.models.families.deepseek_v3 import routing
from srv.models.unsupported import refuse_unless


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})
    sizes, latent, rope = deepseek_sizes({name: value for name, value in config.items() if name != "mlp_layer_types"})
    feeding = feed_forward(config, sizes, routing, sparse_layers(config, sizes.layers))
    attention = latent_attention(latent, rope, bias=bool(config["attention_bias"]))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, feeding))


ARCHITECTURE = Architecture(
    name="Glm4MoeLiteForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    model_type="glm4_moe_lite",
    weights=WEIGHTS,
    names={"head_dim": "qk_rope_head_dim", "num_local_experts": "n_routed_experts"},
)
