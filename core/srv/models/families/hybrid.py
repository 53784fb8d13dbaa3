"""Families with recurrent layers: Mamba, and Kimi's delta attention. Some have attention as well. Torch-free."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from srv.models.blueprint import Linear, Norm, Part, Tensors, alike
from srv.models.blueprint.without_layers import Group, States, UngatedExperts
from srv.models.families.builders import parts
from srv.models.families.builders.decoder_fields import Sizes
from srv.models.families.builders.mamba import state_space
from srv.models.families.builders.without_layers import EPS, experts, kinds, latent, mamba1, sizes
from srv.models.families.family import Family, Fields, UnknownSizes, common
from srv.models.layers.recurrent_sizes import ScanSizes, StateSpaceSizes

PRE_FF_NORMS = ("input_layernorm", "pre_ff_layernorm")


def mamba(c: Fields) -> Part:
    rank = math.ceil(c.hidden_size / 16) if c.time_step_rank == "auto" else c.time_step_rank
    mixer = mamba1(
        c, "mixer", inner=int(c.expand * c.hidden_size), state=c.state_size, rank=rank, width=c.conv_kernel,
        conv_bias=c.use_conv_bias, bias=c.use_bias,
    )  # fmt: skip
    return _alone(c, (mixer,) * c.num_hidden_layers)


def mamba2(c: Fields) -> Part:
    inner = int(c.expand * c.hidden_size)
    scan = ScanSizes(c.num_heads, c.n_groups, inner // c.num_heads, c.state_size)
    bias = bool(c.use_bias)
    mixer = state_space(StateSpaceSizes(scan, c.conv_kernel, bool(c.use_conv_bias), bias, bias), c.hidden_size, EPS)
    return _alone(c, (mixer,) * c.num_hidden_layers)


def _alone(c: Fields, mixers: tuple[Part, ...], **other: Any) -> Part:
    """Layers that are each one part after a norm."""
    count = len(mixers)
    heads = c.get("num_attention_heads") or 1
    filled = {"num_attention_heads": heads, "num_hidden_layers": count, "intermediate_size": 0, **other}
    base = sizes(c.with_values({"max_position_embeddings": 1, **filled}))
    norm = Norm(base.hidden_size, EPS, name="norm")
    tree = parts.decoder(base, alike(mixers, lambda mixer: Group((norm, mixer))))
    return dataclasses.replace(tree, stack=dataclasses.replace(tree.stack, name="backbone"))


def jamba(c: Fields) -> Part:
    """Attention in every eighth layer and experts in every second one, by default."""
    base, state = sizes(c), c.mamba_d_state
    rank = math.ceil(c.hidden_size / 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
    norms = (Norm(rank, EPS, name="dt_layernorm"), *(Norm(state, EPS, name=f"{each}_layernorm") for each in "bc"))
    recurrent = mamba1(
        c, "mamba", inner=c.mamba_expand * c.hidden_size, state=state, rank=rank, width=c.mamba_d_conv,
        conv_bias=c.mamba_conv_bias, bias=c.mamba_proj_bias, norms=norms,
    )  # fmt: skip
    attention, inner, used = parts.attention(base), base.intermediate_size, c.num_experts_per_tok
    dense = parts.mlp(base, name="feed_forward")
    sparse = experts(base, c.num_experts, inner, used, router="router", name="feed_forward")
    layers = [
        (
            index % c.attn_layer_period == c.attn_layer_offset,
            c.num_experts > 1 and index % c.expert_layer_period == c.expert_layer_offset,
        )
        for index in range(base.layers)
    ]

    def layer(kind: tuple[bool, bool]) -> Part:
        attends, is_sparse = kind
        mixer = attention if attends else recurrent
        return parts.pre_norm(base, mixer, sparse if is_sparse else dense, names=PRE_FF_NORMS)

    return parts.decoder(base, alike(layers, layer))


NEMOTRON_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
NEMOTRON_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def nemotron_h(c: Fields) -> Part:
    """Each layer is one of Mamba-2, attention, MLP and experts."""
    pattern, stated = c.get("hybrid_override_pattern"), c.get("layers_block_type") or c.get("layer_types")
    if not (stated or isinstance(pattern, str)):
        raise UnknownSizes("config.json lacks hybrid_override_pattern")
    types = (
        [NEMOTRON_NAMES.get(each, each) for each in stated] if stated else [NEMOTRON_KINDS[each] for each in pattern]
    )
    hidden, bias = c.hidden_size, bool(c.mlp_bias)
    scan = ScanSizes(c.mamba_num_heads, c.n_groups, c.mamba_head_dim, c.ssm_state_size)
    in_out = bool(c.use_bias)
    one = sizes(c.with_values({"num_hidden_layers": len(types), "tie_word_embeddings": False}))
    mixers: dict[str, Part] = {
        "linear_attention": state_space(
            StateSpaceSizes(scan, c.conv_kernel, bool(c.use_conv_bias), in_out, in_out), hidden, EPS
        ),
        "full_attention": parts.attention(one, name="mixer"),
        "mlp": parts.mlp(one, bias, "relu2", name="mixer"),
        "moe": _nemotron_experts(c, one, bias),
    }
    return _alone(c, tuple(mixers[each] for each in types), tie_word_embeddings=False)


def _nemotron_experts(c: Fields, base: Sizes, bias: bool) -> Part:
    hidden, small, count = c.hidden_size, c.moe_latent_size, c.n_routed_experts
    shapes = {"gate.weight": (count, hidden), "gate.e_score_correction_bias": (count,)}
    inner: list[Part] = [
        Tensors(shapes),
        UngatedExperts(count, c.num_experts_per_tok, small or hidden, c.moe_intermediate_size, name="experts"),
        parts.mlp(base, bias, "relu2", inner=c.moe_shared_expert_intermediate_size, name="shared_experts"),
    ]
    if small:
        inner += [Linear({"fc1_latent_proj": small}, hidden, bias), Linear({"fc2_latent_proj": hidden}, small, bias)]
    return Group(tuple(inner), name="mixer")


def kimi_linear(c: Fields) -> Part:
    """Kimi delta attention in three of four layers, latent attention in the others."""
    given, inner = c.get("linear_attn_config") or {}, c.moe_intermediate_size
    attending = {index - 1 for index in given.get("full_attn_layers", ())} or set(range(4, c.num_hidden_layers, 4))
    types = kinds(c, lambda index: "full_attention" if index in attending else "linear_attention")
    first, stated = c.get("first_k_dense_replace", 1), c.get("mlp_layer_types")
    shared = c.n_shared_experts * inner
    base = sizes(c, tied_embeddings=False)
    moe = experts(base, c.num_local_experts, inner, c.num_experts_per_tok, shared=shared, correction=True)
    dense = parts.mlp(base)
    sparse = [stated[i] == "sparse" if stated else i >= first for i in range(base.layers)]
    attention, delta = latent(c, base), _kimi_delta(c, given)
    mixers = [attention if kind == "full_attention" else delta for kind in types]
    feeding = [moe if each else dense for each in sparse]
    return parts.decoder(base, parts.pre_norm_layers(base, mixers, feeding))


def _kimi_delta(c: Fields, given: dict[str, int]) -> States:
    dim, heads = given.get("head_dim", c.linear_head_dim), given.get("num_heads", c.linear_num_heads)
    width, size, hidden = given.get("short_conv_kernel_size", c.linear_conv_kernel_dim), dim * heads, c.hidden_size
    inner = (
        Linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), size), hidden),
        Tensors({"conv1d.weight": (3 * size, 1, width), "dt_bias": (size,), "A_log": (heads,)}),
        Linear({"f_a_proj": dim, "g_a_proj": dim, "b_proj": heads}, hidden),
        Linear({"f_b_proj": size, "g_b_proj": size}, dim),
        Norm(dim, EPS, name="o_norm"),
        Linear({"o_proj": hidden}, size),
    )
    return States(inner, (3 * size, width), (heads, dim, dim), name="self_attn")


JAMBA = Family(
    "jamba", jamba,
    common(
        65536, 4096, 14336, 32, 32, 8, 262144, num_experts=16, num_experts_per_tok=2, attn_layer_offset=4,
        attn_layer_period=8, expert_layer_offset=1, expert_layer_period=2, mamba_conv_bias=True, mamba_d_conv=4,
        mamba_d_state=16, mamba_dt_rank="auto", mamba_expand=2, mamba_proj_bias=False,
    ),
    {"num_local_experts": "num_experts"},
)  # fmt: skip
KIMI_LINEAR = Family(
    "kimi_linear", kimi_linear,
    common(
        163840, 2304, 9216, 27, 32, 32, 1048576, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, linear_conv_kernel_dim=4, linear_head_dim=128, linear_num_heads=32,
        moe_intermediate_size=1024, n_shared_experts=1, num_experts_per_tok=8, num_local_experts=256,
    ),
    {
        "model_max_length": "max_position_embeddings", "num_shared_experts": "n_shared_experts",
        "num_experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts",
    },
)  # fmt: skip
_MAMBA = {"expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
MAMBA = Family(
    "mamba", mamba,
    {
        **_MAMBA, "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16,
        "time_step_rank": "auto", "tie_word_embeddings": True,
    },
)  # fmt: skip
MAMBA2 = Family(
    "mamba2", mamba2,
    {
        **_MAMBA, "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "state_size": 128,
        "num_heads": 128, "n_groups": 8, "head_dim": 64, "tie_word_embeddings": False,
    },
)  # fmt: skip
NEMOTRON_H = Family(
    "nemotron_h", nemotron_h,
    {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "mlp_bias": False,
        "use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "n_groups": 8, "mamba_head_dim": 64,
        "mamba_num_heads": 128, "ssm_state_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None,
        "tie_word_embeddings": False,
    },
    {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},
)  # fmt: skip
