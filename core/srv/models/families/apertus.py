"""Apertus: norms of heads, and MLPs without a gate whose activation, xIELU, has parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import MLP, Activation, LearnedMLP, Part, Tensors
from srv.models.families.architecture import Architecture
from srv.models.families.builders import layer_norm, parts
from srv.models.families.builders.decoder_fields import Sizes, decoder_sizes, with_default_rope
from srv.models.families.llama import LLAMA_DEFAULTS
from srv.models.unsupported import refuse_unless

XIELU: Activation = "xielu"
NORMS = ("attention_layernorm", "feedforward_layernorm")
# Of the code that was published with the first checkpoints; transformers computes the values here alone.
SUPPORTED: dict[str, tuple[Any, ...]] = {"qk_norm": (True,), "post_norm": (False,), "mlp_bias": (False,)}
# What transformers fills in for a configuration without RoPE parameters.
ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def tree(config: Mapping[str, Any]) -> Part:
    refuse_unless(config, SUPPORTED)
    sizes = decoder_sizes(with_default_rope(config, ROPE), reads=("hidden_act",))
    attention = parts.attention(sizes, bias=bool(config["attention_bias"]), norms=parts.head_norms(sizes))
    layer = parts.pre_norm(sizes, attention, _mlp(config, sizes), names=NORMS)
    return parts.decoder(sizes, (layer,) * sizes.layers)


def _mlp(config: Mapping[str, Any], sizes: Sizes) -> MLP:
    """xIELU has two parameters per layer, and two constants that are stored."""
    if config["hidden_act"] != XIELU:
        return parts.mlp(sizes, activation=layer_norm.activation(config, "hidden_act"))
    mlp, shapes = parts.mlp(sizes, activation=XIELU), {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return LearnedMLP(mlp.up, mlp.down, XIELU, learned=Tensors(shapes, name="act_fn"), name=mlp.name)


ARCHITECTURE = Architecture(
    name="ApertusForCausalLM",
    tree=tree,
    defaults={
        **LLAMA_DEFAULTS,
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "hidden_act": XIELU,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12000000.0,
        "eos_token_id": 2,
    },
)
