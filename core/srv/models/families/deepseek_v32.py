"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention reads the keys that an indexer chooses (sparse attention).

In GLM-5, some layers have no indexer and read the keys that a layer before has chosen. The rotary pairs of its indexer
are adjacent, those of V3.2's are half the rotated dimensions apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, MoE, Part, alike
from srv.models.blueprint.indexers import indexer_types
from srv.models.blueprint.latent import Latent
from srv.models.checkpoints.gguf_layout import layer_names
from srv.models.checkpoints.rules import PermuteRotary
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.deepseek import DEFAULTS as BASE
from srv.models.families.builders.deepseek import (
    WEIGHTS,
    deepseek_sizes,
    feed_forward,
    gguf_layout,
    rotary_dims,
    sparse_layers,
)
from srv.models.families.builders.latent import index_dims, indexer_part, latent_attention
from srv.models.families.deepseek_v3 import routing
from srv.models.layers.moe_config import ExpertActivation
from srv.models.unsupported import UnsupportedConfig, refuse_unless

_V3 = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
_INDEXED = "indexed_attention"


def v32_tree(config: Mapping[str, Any]) -> Part:
    sizes, mixers, feeding = sparse_parts(config, ["full"] * int(config["num_hidden_layers"]))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, feeding))


def glm_tree(config: Mapping[str, Any]) -> Part:
    sizes, mixers, feeding = sparse_parts(config, indexer_types(config.get, int(config["num_hidden_layers"])))
    return parts.decoder(sizes, parts.pre_norm_layers(sizes, mixers, feeding))


def sparse_parts(
    config: Mapping[str, Any],
    kinds: list[str],
    *,
    index_norm_eps: float = 1e-6,
    index_rotates_last: bool = False,
    activation: ExpertActivation = "silu",
    gated: bool = False,
    gated_queries: bool = False,
    sinks: bool = False,
) -> tuple[Sizes, tuple[Latent, ...], list[MLP | MoE]]:
    """The sizes of a model with sparse attention, and the two parts of each layer.

    `kinds`: of each layer, "full" if it has an indexer, "shared" if it reads the keys that a layer before chose.
    `index_norm_eps`, `index_rotates_last`: as of `indexer_part`. `activation`: of experts. The others are those of
    `latent_attention`. Raises UnsupportedConfig with the field that is not implemented.
    """
    refuse_unless(config, _V3)
    layers = int(config["num_hidden_layers"])
    others = set(config.get("layer_types") or ()) - {_INDEXED}
    if others:
        raise UnsupportedConfig(f"layer_types with {', '.join(sorted(others))} is not implemented natively")
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise UnsupportedConfig(
            f'indexer_types = {kinds!r} is not implemented natively: it needs "full" or "shared" for each of '
            f'{layers} layers, and "full" for the first one'
        )
    sizes, latent, rope = deepseek_sizes({name: value for name, value in config.items() if name != "mlp_layer_types"})
    feeding = feed_forward(config, sizes, routing, sparse_layers(config, layers), activation)
    index = index_dims(config)
    own = indexer_part(latent, index, norm_eps=index_norm_eps, rotates_last=index_rotates_last)

    def attention(kind: str) -> Latent:
        return latent_attention(
            latent,
            rope,
            bias=bool(config["attention_bias"]),
            index=index,
            indexer=own if kind == "full" else None,
            gated=gated,
            gated_queries=gated_queries,
            sinks=sinks,
        )

    return sizes, alike(kinds, attention), feeding


DEFAULTS: Mapping[str, Any] = {
    **BASE,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_layer_types": None,
    "layer_types": None,
    "index_topk": 2048,
    "index_head_dim": 128,
    "eos_token_id": 1,
}

_GGUF_INDEXER = layer_names(
    {
        "indexer.attn_q_b": "self_attn.indexer.wq_b",
        "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.k_norm": "self_attn.indexer.k_norm",
        "indexer.proj": "self_attn.indexer.weights_proj",
    }
)
_GGUF_INDEX_FIELDS = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_GGUF = gguf_layout("noaux_tc", first_k_dense_replace=0)

V32 = Architecture(
    name="DeepseekV32ForCausalLM",
    tree=v32_tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "topk_group": 4,
        "index_n_heads": 64,
    },
    gguf=_GGUF._replace(
        name="deepseek32",
        weights=(_GGUF_INDEXER, *_GGUF.weights),
        fields={**_GGUF.fields, **_GGUF_INDEX_FIELDS},
    ),
    model_type="deepseek_v32",
    weights=WEIGHTS,
    runs_through_transformers=False,
)
GLM = Architecture(
    name="GlmMoeDsaForCausalLM",
    tree=glm_tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "indexer_types": None,
    },
    model_type="glm_moe_dsa",
    weights=(PermuteRotary(rotary_dims, indexer=True),),
    runs_through_transformers=False,
)
