"""The facts of a decoder that norms what attention and MLP return, and all queries and keys of a token at once.

Three of four layers attend to a sliding window. This is OLMo 3 under a name of its own, because `srv` has that one, so
that tests can compare it with transformers. Torch-free; `normed_layers` computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Norm, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes, windows_of_pattern
from srv.models.unsupported import UnsupportedConfig

KINDS = ("full_attention", "sliding_attention")
NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


def tree(config: Mapping[str, Any]) -> Part:
    """Norms of queries and keys are over all heads; ranks that divide these add up the squares."""
    sizes, bias = decoder_sizes(_of_one_rope(config)), bool(config["attention_bias"])
    norms, mlp = parts.joint_norms(sizes), parts.mlp(sizes)
    after, last = (Norm(sizes.hidden_size, sizes.norm_eps, name=name) for name in NORMS)

    def layer(window: int | None) -> Layer:
        return Layer((), (parts.attention(sizes, bias=bias, norms=norms, window=window),), (after,), mlp, (last,))

    return parts.decoder(sizes, alike(windows_of_pattern(config, sizes.layers), layer))


def _of_one_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the rotary embedding of all layers, which transformers has for each kind of them."""
    parameters = config.get("rope_parameters") or {}
    ropes = [parameters[kind] for kind in KINDS if kind in parameters]
    if any(rope != ropes[0] for rope in ropes):
        raise UnsupportedConfig("rope_parameters of layers with a window that differ from those of the others")
    return {**config, "rope_parameters": ropes[0] if ropes else parameters}


ARCHITECTURE = Architecture(
    name="NormedForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "eos_token_id": 50279,
    },
    layers="srv_example_models.normed_layers:Normed",
)
