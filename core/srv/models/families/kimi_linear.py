"""Kimi Linear: delta attention in most layers, latent attention in the others.

Its sizes alone are known. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from srv.models.blueprint import Linear, Norm, Part, Tensors
from srv.models.blueprint.latent import Latent
from srv.models.blueprint.without_layers import States
from srv.models.families.architecture import Architecture
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.deepseek import sparse_layers
from srv.models.families.builders.latent import latent_attention, latent_sizes
from srv.models.families.builders.layer_types import ATTENTION
from srv.models.families.builders.without_layers import EPS, common, sizes
from srv.models.layers.moe_config import Routing


def kimi_linear(c: Mapping[str, Any]) -> Part:
    """Kimi delta attention in three of four layers, latent attention in the others."""
    given, inner, base = c.get("linear_attn_config") or {}, c["moe_intermediate_size"], sizes(c, tied_embeddings=False)
    attending = {index - 1 for index in given.get("full_attn_layers", ())} or set(range(4, base.layers, 4))
    types = c.get("layer_types") or [ATTENTION if index in attending else "" for index in range(base.layers)]
    routing = Routing(c["num_experts_per_tok"], bias=True)
    shared = c["n_shared_experts"] * inner
    sparse = parts.mixture(base, c["num_local_experts"], inner, routing, shared=shared, shared_name="shared_experts")
    feeding = [sparse if each else parts.mlp(base) for each in sparse_layers(c, base.layers)]
    mixers = [_latent(c, base) if each == ATTENTION else _kimi_delta(c, given) for each in types]
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


def _latent(c: Mapping[str, Any], base: Sizes) -> Latent:
    assert base.rope is not None
    return latent_attention(latent_sizes(c, base.rope, EPS), base.rope, bias=bool(c["attention_bias"]))


def _kimi_delta(c: Mapping[str, Any], given: dict[str, int]) -> States:
    dim, heads = given.get("head_dim", c["linear_head_dim"]), given.get("num_heads", c["linear_num_heads"])
    width, size, hidden = (
        given.get("short_conv_kernel_size", c["linear_conv_kernel_dim"]),
        dim * heads,
        c["hidden_size"],
    )
    inner = (
        Linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), hidden),
        Tensors({"conv1d.weight": (3 * size, 1, width), "dt_bias": (size,), "A_log": (heads,)}),
        Linear({"f_a_proj": dim, "g_a_proj": dim, "b_proj": heads}, hidden),
        Linear({"f_b_proj": size, "g_b_proj": size}, dim),
        Norm(dim, EPS, name="o_norm"),
        Linear({"o_proj": hidden}, size),
    )
    return States(inner, (3 * size, width), (heads, dim, dim), name="self_attn")


ARCHITECTURE = Architecture(
    name="KimiLinearForCausalLM",
    tree=kimi_linear,
    defaults=common(
        163840,
        2304,
        9216,
        27,
        32,
        32,
        1048576,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        linear_conv_kernel_dim=4,
        linear_head_dim=128,
        linear_num_heads=32,
        moe_intermediate_size=1024,
        n_shared_experts=1,
        num_experts_per_tok=8,
        num_local_experts=256,
        first_k_dense_replace=1,
    ),
    layers=None,
    model_type="kimi_linear",
    names={
        "model_max_length": "max_position_embeddings",
        "num_shared_experts": "n_shared_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_experts": "num_local_experts",
    },
    runs_through_transformers=False,
)
