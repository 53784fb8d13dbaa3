"""OLMo Hybrid: the facts of a decoder most of whose layers have the gated delta rule, and the others attention.

Layers of the two kinds have their norms in other places. Published checkpoints have a convolution each of queries, keys
and values; transformers 5.23 saves their rows as three parts of equal size, whose shapes are refused where they differ.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Norm, Part, alike
from srv.models.checkpoints.rules import Rename
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes
from srv.models.families.builders.layer_types import ATTENTION, has_attention
from srv.models.families.qwen3_next import delta_net
from srv.models.layers.delta_sizes import DeltaSizes
from srv.models.unsupported import UnsupportedConfig

LINEAR = "linear_attention"
DELTA_EPS = 1e-5  # of the norm of the rule's results, whatever rms_norm_eps is


def tree(config: Mapping[str, Any]) -> Part:
    sizes, bias = decoder_sizes(config), bool(config["attention_bias"])
    attends = has_attention(_kinds(config["layer_types"], sizes.layers), (ATTENTION, LINEAR), sizes.layers)
    delta = delta_net(_delta_sizes(config, sizes), sizes.hidden_size, DELTA_EPS)
    norms, mlp = parts.joint_norms(sizes), parts.mlp(sizes)
    attention = parts.attention(sizes, bias=bias, norms=norms, rotated=_is_rotated(config))

    def layer(has_attention: bool) -> Layer:
        """With a norm after each part, or one before each."""
        if not has_attention:
            return parts.pre_norm(sizes, delta, mlp)
        after, last = (
            Norm(sizes.hidden_size, sizes.norm_eps, name=f"post_{part}_layernorm")
            for part in ("attention", "feedforward")
        )
        return Layer((), (attention,), (after,), mlp, (last,))

    return parts.decoder(sizes, alike(attends, layer))


def _kinds(types: list[str] | None, layers: int) -> list[str]:
    """By default every fourth layer has attention, and the last one of a model with fewer layers."""
    if types is not None:
        return types
    return [ATTENTION if index % 4 == 3 or index + 1 == layers < 4 else LINEAR for index in range(layers)]


def _is_rotated(config: Mapping[str, Any]) -> bool:
    """Published models state a base of null, and have no positions."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return (given if "rope_theta" in given else {"rope_theta": 0.0, **config})["rope_theta"] is not None


def _delta_sizes(config: Mapping[str, Any], base: Sizes) -> DeltaSizes:
    key_heads, value_heads = (
        base.heads if config[name] is None else int(config[name])
        for name in ("linear_num_key_heads", "linear_num_value_heads")
    )
    if value_heads % key_heads:
        reason = f"{value_heads} value heads are not a multiple of {key_heads} key heads"
        raise UnsupportedConfig(f"{reason} (linear_num_value_heads, linear_num_key_heads)")
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    key_dim = int(0.75 * base.hidden_size / key_heads) if key_dim is None else int(key_dim)
    return DeltaSizes(
        key_heads,
        value_heads,
        key_dim,
        2 * key_dim if value_dim is None else int(value_dim),
        int(config["linear_conv_kernel_dim"]),
        by_heads=False,
        apart=True,
        negative=bool(config["linear_allow_neg_eigval"]),
    )


ARCHITECTURE = Architecture(
    name="OlmoHybridForCausalLM",
    tree=tree,
    defaults={
        "vocab_size": 100352,
        "hidden_size": 3840,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "layer_types": None,
        "linear_num_key_heads": None,
        "linear_num_value_heads": None,
        "linear_key_head_dim": None,
        "linear_value_head_dim": None,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "eos_token_id": 100257,
    },
    model_type="olmo_hybrid",
    weights=(
        Rename(
            {
                "model.layers.*.attention_layer_norm": "model.layers.*.input_layernorm",
                "model.layers.*.feedforward_layer_norm": "model.layers.*.post_attention_layernorm",
            }
        ),
    ),
    runs_through_transformers=False,
)
