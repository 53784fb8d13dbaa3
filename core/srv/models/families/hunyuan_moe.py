"""Hunyuan-A13B: experts beside a shared one in every layer, and norms of heads after the rotation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Layer, Part, alike
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import DEFAULTS, decoder_sizes
from srv.models.families.builders.layer_types import check_experts
from srv.models.families.hunyuan import HEAD_NORMS
from srv.models.layers.moe_config import COUNT_FIELDS, Routing
from srv.models.unsupported import UnsupportedConfig, refuse_unless

# Fields of published configurations that the class of transformers does not read; no released model has other values.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_cla": (False,),
    "use_qk_norm": (True,),
    "use_mixed_mlp_moe": (True,),
    "use_mla": (False,),
    "group_limited_greedy": (False,),
    "mlp_bias": (False,),
}


def tree(config: Mapping[str, Any]) -> Part:
    """The number of experts that a token uses may differ per layer."""
    refuse_unless(config, SUPPORTED)
    sizes, count = decoder_sizes(config, reads=COUNT_FIELDS), int(config["num_experts"])
    for name, only in (("num_shared_expert", 1), ("moe_intermediate_size", sizes.intermediate_size)):
        if any(each != only for each in _of_layers(config.get(name) or only, sizes.layers)):
            raise UnsupportedConfig(f"{name} = {config[name]!r} is not implemented natively: all layers have {only}")
    attention = parts.attention(
        sizes, bias=bool(config["attention_bias"]), norms=parts.head_norms(sizes), norms_rotated=True
    )

    def layer(used: int) -> Layer:
        check_experts(used, count)
        inner = sizes.intermediate_size
        routing = Routing(used, renormalize=True)
        experts = parts.mixture(sizes, count, inner, routing, shared=inner, shared_name="shared_mlp", router="gate.wg")
        return parts.pre_norm(sizes, attention, experts)

    return parts.decoder(sizes, alike(_of_layers(config["moe_topk"], sizes.layers), layer))


def _of_layers(value: int | list[int], layers: int) -> list[int]:
    """The values of a field which has one for all layers, or a list."""
    found = value if isinstance(value, list) else [value] * layers
    if len(found) < layers:
        raise UnsupportedConfig(f"{found!r} are {len(found)} values for {layers} layers")
    return found[:layers]


ARCHITECTURE = Architecture(
    name="HunYuanMoEV1ForCausalLM",
    tree=tree,
    defaults={
        **DEFAULTS,
        "vocab_size": 290943,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "num_experts": 1,
        "moe_topk": 1,
    },
    model_type="hunyuan_v1_moe",
    weights=(HEAD_NORMS,),
    names={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)
