"""Nemotron-H: each layer is Mamba-2, attention, an MLP or experts. Its sizes alone are known. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Linear, Part, Tensors
from srv.models.blueprint.without_layers import Group, UngatedExperts
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.mamba import state_space
from srv.models.families.builders.without_layers import EPS, alone, sizes
from srv.models.layers.recurrent_sizes import ScanSizes, StateSpaceSizes
from srv.models.unsupported import UnsupportedConfig

NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NEMOTRON_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h(c: Mapping[str, Any]) -> Part:
    """Each layer is one of Mamba-2, attention, MLP and experts."""
    pattern, stated = c.get("hybrid_override_pattern"), c.get("layers_block_type") or c.get("layer_types")
    if not (stated or isinstance(pattern, str)):
        raise UnsupportedConfig("config.json lacks hybrid_override_pattern")
    if stated:
        types = [NEMOTRON_NAMES.get(each, each) for each in stated]
    else:
        types = [NEMOTRON_KINDS[each] for each in pattern or ""]
    hidden, bias = c["hidden_size"], bool(c["mlp_bias"])
    scan = ScanSizes(c["mamba_num_heads"], c["n_groups"], c["mamba_head_dim"], c["ssm_state_size"])
    in_out = bool(c["use_bias"])
    one = sizes({**c, "num_hidden_layers": len(types), "tie_word_embeddings": False})
    mixers: dict[str, Part] = {
        "linear_attention": state_space(
            StateSpaceSizes(scan, c["conv_kernel"], bool(c["use_conv_bias"]), in_out, in_out), hidden, EPS
        ),
        "full_attention": parts.attention(one, name="mixer"),
        "mlp": parts.mlp(one, bias, "relu2", name="mixer"),
        "moe": _nemotron_experts(c, one, bias),
    }
    return alone(c, tuple(mixers[each] for each in types), tie_word_embeddings=False)


def _nemotron_experts(c: Mapping[str, Any], base: Sizes, bias: bool) -> Part:
    hidden, small, count = c["hidden_size"], c["moe_latent_size"], c["n_routed_experts"]
    shapes = {"gate.weight": (count, hidden), "gate.e_score_correction_bias": (count,)}
    inner: list[Part] = [
        Tensors(shapes),
        UngatedExperts(count, c["num_experts_per_tok"], small or hidden, c["moe_intermediate_size"], name="experts"),
        parts.mlp(base, bias, "relu2", inner=c["moe_shared_expert_intermediate_size"], name="shared_experts"),
    ]
    if small:
        inner += [Linear({"fc1_latent_proj": small}, hidden, bias), Linear({"fc2_latent_proj": hidden}, small, bias)]
    return Group(tuple(inner), name="mixer")


ARCHITECTURE = Architecture(
    name="NemotronHForCausalLM",
    tree=nemotron_h,
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "conv_kernel": 4,
        "n_groups": 8,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "ssm_state_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "tie_word_embeddings": False,
    },
    layers=None,
    model_type="nemotron_h",
    names={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    former_names={"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},
    runs_through_transformers=False,
)
