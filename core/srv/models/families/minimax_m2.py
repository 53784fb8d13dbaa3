"""MiniMax-M2: norms over all queries and all keys, partial rotation, and experts with a sigmoid router. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Part
from srv.models.checkpoints.gguf_layout import EXPERT_COUNT, EXPERT_FIELDS, HEAD_NORM_NAMES, SIGMOID_ROUTER, GGUFLayout
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import UnsupportedConfig, refuse_unless

# Fields of published configurations that the class of transformers does not read; no released model has other values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
    "attention_bias": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    if not all(kind == 1 for kind in config.get("attn_type_list") or ()):
        raise UnsupportedConfig("attn_type_list with layers of linear attention (0) is not implemented natively")
    sizes = decoder_sizes(_with_rotated_share(config), reads=("partial_rotary_factor", *COUNT_FIELDS))
    attention = parts.attention(sizes, norms=parts.joint_norms(sizes))
    routing = Routing(int(config["num_experts_per_tok"]), scoring="sigmoid", renormalize=True, bias=True)
    experts = parts.mixture(sizes, int(config["num_local_experts"]), sizes.intermediate_size, routing)
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, attention, experts))


def _with_rotated_share(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the share of rotated dimensions, of which published ones state the number."""
    rotated = config.get("rotary_dim")
    if rotated is None or config.get("partial_rotary_factor") is not None:
        return config
    return {**config, "partial_rotary_factor": rotated / config["head_dim"]}


ARCHITECTURE = Architecture(
    name="MiniMaxM2ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    gguf=GGUFLayout(
        "minimax-m2",
        weights=(HEAD_NORM_NAMES,),
        fields={
            **EXPERT_FIELDS,
            EXPERT_COUNT: "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        implied=SIGMOID_ROUTER,
    ),
    model_type="minimax_m2",
    weights=(
        Rename(
            prefix="model.",
            names={"layers.*.mlp.e_score_correction_bias": "model.layers.*.mlp.gate.e_score_correction_bias"},
            parts={"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
        ),
    ),
    names={"num_experts": "num_local_experts"},
)
