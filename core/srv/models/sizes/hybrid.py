"""Families with recurrent layers: Mamba, gated delta rule, short convolutions. Some have attention as well."""

from __future__ import annotations

import math
from typing import Any

from srv.models.sizes.blocks import (
    attention,
    decoder,
    experts,
    gated_mlp,
    head_dim,
    kinds,
    latent_attention,
    mamba1,
    mamba2,
    moe,
    pre_norm,
    state_cache,
    two_layer_mlp,
    window_of,
)
from srv.models.sizes.fields import Fields
from srv.models.sizes.mixture import granite_experts, granite_shared_mlp, qwen_moe_mlp, sparse_layers
from srv.models.sizes.parts import NOTHING, Part, UnknownSizes, linear, norm, norms, plain

PRE_FF_NORMS = ("input_layernorm", "pre_ff_layernorm")
RECURRENT = ("linear_attention", "mamba")


def mamba(c: Fields) -> Part:
    inner = int(c.expand * c.hidden_size)
    rank = math.ceil(c.hidden_size / 16) if c.time_step_rank == "auto" else c.time_step_rank
    mixer = mamba1(
        c, "mixer", inner=inner, state=c.state_size, rank=rank, width=c.conv_kernel,
        conv_bias=c.use_conv_bias, bias=c.use_bias, extra=NOTHING,
    )  # fmt: skip
    return _backbone(c, mixer)


def mamba2_model(c: Fields) -> Part:
    mixer = mamba2(
        c, "mixer", inner=int(c.expand * c.hidden_size), heads=c.num_heads, state=c.state_size, groups=c.n_groups,
        width=c.conv_kernel, conv_bias=c.use_conv_bias, bias=c.use_bias,
    )  # fmt: skip
    return _backbone(c, mixer)


def _backbone(c: Fields, mixer: Part) -> Part:
    layer = mixer + norm("norm", c.hidden_size)
    return decoder(c, lambda i: layer, name="backbone", embedding="embeddings", last_norm="norm_f")


def _mamba2_of(c: Fields, inner: int, **options: Any) -> Part:
    """With the field names of Bamba, Granite and Falcon."""
    return mamba2(
        c, "mamba", inner=inner, heads=c.mamba_n_heads, state=c.mamba_d_state, groups=c.mamba_n_groups,
        width=c.mamba_d_conv, conv_bias=c.mamba_conv_bias, bias=c.mamba_proj_bias, **options,
    )  # fmt: skip


def bamba(c: Fields) -> Part:
    bias, attending = c.attention_bias, set(c.attn_layer_indices or ())
    mixer = _mamba2_of(c, int(c.mamba_expand * c.hidden_size))
    own = attention(c, qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(c, "feed_forward", bias=c.mlp_bias)
    return decoder(
        c,
        lambda i: pre_norm(c, own if i in attending else mixer, mlp, names=PRE_FF_NORMS),
        last_norm="final_layernorm",
    )


def granite_hybrid(c: Fields) -> Part:
    bias, types = c.attention_bias, kinds(c, lambda i: "linear_attention")
    mixer = _mamba2_of(c, int(c.mamba_expand * c.hidden_size))
    own = attention(c, qkv_bias=bias, out_bias=bias)
    mlp = granite_experts(c) + granite_shared_mlp(c)
    return decoder(c, lambda i: pre_norm(c, mixer if types[i] in RECURRENT else own, mlp))


def falcon_h1(c: Fields) -> Part:
    """Attention and Mamba side by side in every layer."""
    bias = c.attention_bias
    inner = int(c.mamba_expand * c.hidden_size) if c.mamba_d_ssm is None else c.mamba_d_ssm
    mixer = _mamba2_of(c, inner, gate_norm=c.mamba_rms_norm, out_bias=c.projectors_bias)
    own = attention(c, qkv_bias=bias, out_bias=bias)
    layer = pre_norm(c, own, mixer, gated_mlp(c, "feed_forward", bias=c.mlp_bias), names=PRE_FF_NORMS)
    return decoder(c, lambda i: layer, last_norm="final_layernorm")


def jamba(c: Fields) -> Part:
    """Attention in every eighth layer and experts in every second one, by default."""
    rank = math.ceil(c.hidden_size / 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
    state = c.mamba_d_state
    of_steps = norm("dt_layernorm", rank) + norm("b_layernorm", state) + norm("c_layernorm", state)
    mixer = mamba1(
        c, "mamba", inner=c.mamba_expand * c.hidden_size, state=state, rank=rank, width=c.mamba_d_conv,
        conv_bias=c.mamba_conv_bias, bias=c.mamba_proj_bias, extra=of_steps,
    )  # fmt: skip
    own, dense = attention(c), gated_mlp(c, "feed_forward")
    sparse = moe(
        c, count=c.num_experts, inner=c.intermediate_size, used=c.num_experts_per_tok,
        router="router", name="feed_forward",
    )  # fmt: skip

    def layer(i: int) -> Part:
        attends = i % c.attn_layer_period == c.attn_layer_offset
        has_experts = c.num_experts > 1 and i % c.expert_layer_period == c.expert_layer_offset
        return pre_norm(c, own if attends else mixer, sparse if has_experts else dense, names=PRE_FF_NORMS)

    return decoder(c, layer, last_norm="final_layernorm")


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
    hidden, small = c.hidden_size, c.moe_latent_size
    width, count = small or hidden, c.n_routed_experts
    routed = plain("gate", count, hidden) + plain("gate.e_score_correction_bias", count)
    routed += experts(width, c.moe_intermediate_size, count, c.num_experts_per_tok, gated=False)
    if small:
        routed += linear("fc1_latent_proj", hidden, small, c.mlp_bias) + linear(
            "fc2_latent_proj", small, hidden, c.mlp_bias
        )
    shared = c.moe_shared_expert_intermediate_size
    routed += two_layer_mlp(c, "shared_experts", shared, "up_proj", "down_proj", bias=c.mlp_bias)
    mixers = {
        "linear_attention": mamba2(
            c, "mixer", inner=c.mamba_num_heads * c.mamba_head_dim, heads=c.mamba_num_heads, state=c.ssm_state_size,
            groups=c.n_groups, width=c.conv_kernel, conv_bias=c.use_conv_bias, bias=c.use_bias,
        ),
        "full_attention": attention(c, "mixer"),
        "mlp": two_layer_mlp(c, "mixer", c.intermediate_size, "up_proj", "down_proj", bias=c.mlp_bias),
        "moe": routed.under("mixer"),
    }  # fmt: skip

    def layer(i: int) -> Part:
        return mixers[types[i]] + norm("norm", hidden)

    return decoder(c, layer, count=len(types), tied=False, embedding="embeddings", last_norm="norm_f")


def delta_rule(c: Fields, *, fused: bool) -> Part:
    """Qwen's gated delta rule. `fused`: queries, keys, values and gates are one linear layer."""
    hidden, width = c.hidden_size, c.linear_conv_kernel_dim
    heads, value_heads = c.linear_num_key_heads, c.linear_num_value_heads
    keys, values = heads * c.linear_key_head_dim, value_heads * c.linear_value_head_dim
    channels = 2 * keys + values
    if fused:
        own = linear("in_proj_qkvz", hidden, channels + values) + linear("in_proj_ba", hidden, 2 * value_heads)
    else:
        own = linear("in_proj_qkv", hidden, channels) + linear("in_proj_z", hidden, values)
        own += linear("in_proj_b", hidden, value_heads) + linear("in_proj_a", hidden, value_heads)
    own += plain("conv1d", channels, 1, width) + plain("dt_bias", value_heads) + plain("A_log", value_heads)
    own += norm("norm", c.linear_value_head_dim) + linear("out_proj", values, hidden)
    state = (value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    return own.under("linear_attn") + state_cache(c, (channels, width), state)


def _qwen_kinds(c: Fields) -> list[str]:
    interval = c.get("full_attention_interval", 4)
    return list(kinds(c, lambda i: "linear_attention" if (i + 1) % interval else "full_attention"))


def qwen3_next(c: Fields) -> Part:
    types, sparse, bias = _qwen_kinds(c), sparse_layers(c), c.attention_bias
    recurrent, experts_part = delta_rule(c, fused=True), qwen_moe_mlp(c)
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", gated=True)

    def layer(i: int) -> Part:
        mixer = recurrent if types[i] == "linear_attention" else own
        return pre_norm(c, mixer, experts_part if sparse[i] else gated_mlp(c))

    return decoder(c, layer)


def qwen3_5(c: Fields) -> Part:
    return _qwen3_5(c, gated_mlp(c))


def qwen3_5_moe(c: Fields) -> Part:
    return _qwen3_5(c, qwen_moe_mlp(c))


def _qwen3_5(c: Fields, mlp: Part) -> Part:
    types, bias, recurrent = _qwen_kinds(c), c.attention_bias, delta_rule(c, fused=False)
    own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", gated=True)
    return decoder(c, lambda i: pre_norm(c, recurrent if types[i] == "linear_attention" else own, mlp))


def kimi_linear(c: Fields) -> Part:
    """Kimi delta attention in three of four layers, latent attention in the others."""
    hidden, given = c.hidden_size, c.get("linear_attn_config") or {}
    dim, heads = given.get("head_dim", c.linear_head_dim), given.get("num_heads", c.linear_num_heads)
    width, size = given.get("short_conv_kernel_size", c.linear_conv_kernel_dim), dim * heads
    attending = {i - 1 for i in given.get("full_attn_layers", ())} or set(range(4, c.num_hidden_layers, 4))
    types = kinds(c, lambda i: "full_attention" if i in attending else "linear_attention")
    first, stated = c.get("first_k_dense_replace", 1), c.get("mlp_layer_types")
    own = linear("q_proj", hidden, size) + linear("k_proj", hidden, size) + linear("v_proj", hidden, size)
    own += plain("conv1d", 3 * size, 1, width) + plain("dt_bias", size) + plain("A_log", heads)
    own += linear("f_a_proj", hidden, dim) + linear("f_b_proj", dim, size) + linear("b_proj", hidden, heads)
    own += linear("g_a_proj", hidden, dim) + linear("g_b_proj", dim, size) + norm("o_norm", dim)
    own += linear("o_proj", size, hidden)
    recurrent = own.under("self_attn") + state_cache(c, (3 * size, width), (heads, dim, dim))
    latent, dense = latent_attention(c, bias=c.attention_bias), gated_mlp(c)
    inner, count = c.moe_intermediate_size, c.num_local_experts
    sparse = moe(
        c, count=count, inner=inner, used=c.num_experts_per_tok, shared=c.n_shared_experts * inner, correction=True
    )

    def layer(i: int) -> Part:
        is_sparse = stated[i] == "sparse" if stated else i >= first
        return pre_norm(c, latent if types[i] == "full_attention" else recurrent, sparse if is_sparse else dense)

    return decoder(c, layer, tied=False)


def minimax(c: Fields) -> Part:
    """Lightning attention, and softmax attention in every second layer by default.

    The decays that checkpoints store are not loaded: layers compute them.
    """
    hidden, heads, dim = c.hidden_size, c.num_attention_heads, head_dim(c)
    types = kinds(c, lambda i: "linear_attention" if i % 2 else "full_attention")
    linears = linear("qkv_proj", hidden, 3 * heads * dim) + linear("output_gate", hidden, heads * dim)
    linears += linear("out_proj", heads * dim, hidden) + norm("norm", heads * dim)
    recurrent = linears.under("self_attn") + state_cache(c, None, (heads, dim, dim))
    own = attention(c, window=c.sliding_window)
    mlp = moe(
        c, count=c.num_local_experts, inner=c.intermediate_size, used=c.num_experts_per_tok, name="block_sparse_moe"
    )
    return decoder(c, lambda i: pre_norm(c, recurrent if types[i] == "linear_attention" else own, mlp))


def _short_convolution(c: Fields, width: int) -> Part:
    hidden, bias = c.hidden_size, c.conv_bias
    own = plain("conv", hidden, 1, width) + (plain("conv.bias", hidden) if bias else NOTHING)
    own += linear("in_proj", hidden, 3 * hidden, bias) + linear("out_proj", hidden, hidden, bias)
    return own.under("conv") + state_cache(c, (hidden, width))


def _lfm2_attention(c: Fields) -> Part:
    return attention(c, out="out_proj", qk_norms="head", norm_names=("q_layernorm", "k_layernorm"))


def _lfm2_mlp(c: Fields, inner: int) -> Part:
    own = linear("w1", c.hidden_size, inner) + linear("w3", c.hidden_size, inner) + linear("w2", inner, c.hidden_size)
    return own.under("feed_forward")


def lfm2(c: Fields) -> Part:
    """Short convolutions, and attention in some layers."""
    attending = c.full_attn_idxs
    types = kinds(c, lambda i: "full_attention" if attending is None or i in attending else "conv")
    inner = c.intermediate_size
    if c.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if c.block_ffn_dim_multiplier is not None:
            inner = int(c.block_ffn_dim_multiplier * inner)
            inner = c.block_multiple_of * -(-inner // c.block_multiple_of)
    return _lfm2_model(c, types, lambda i: _lfm2_mlp(c, inner), c.conv_L_cache)


def lfm2_moe(c: Fields) -> Part:
    correction = plain("feed_forward.expert_bias", c.num_experts) if c.use_expert_bias else NOTHING
    sparse = moe(c, count=c.num_experts, inner=c.moe_intermediate_size, used=c.num_experts_per_tok, name="feed_forward")
    dense = _lfm2_mlp(c, c.intermediate_size)
    return _lfm2_model(
        c,
        kinds(c, lambda i: "full_attention"),
        lambda i: dense if i < c.num_dense_layers else sparse + correction,
        c.conv_L_cache,
    )


def _lfm2_model(c: Fields, types: Any, mlp: Any, width: int) -> Part:
    own, convolution, names = _lfm2_attention(c), _short_convolution(c, width), ("operator_norm", "ffn_norm")
    return decoder(
        c,
        lambda i: pre_norm(c, own if types[i] == "full_attention" else convolution, mlp(i), names=names),
        last_norm="embedding_norm",
    )


def lfm3(c: Fields) -> Part:
    """As LFM2, with windows and gates of heads, and norms of the outputs of both parts of a layer."""
    types = kinds(c, lambda i: "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 < i else "conv")
    convolution, mlp, bias = _short_convolution(c, c.conv_L_cache), _lfm2_mlp(c, c.intermediate_size), c.attention_bias
    gates = linear("self_attn.gate_proj", c.hidden_size, c.num_attention_heads) if c.use_attention_gate else NOTHING
    after = norms(c.hidden_size, "post_operator_norm", "post_ffn_norm") if c.use_sandwich_norm else NOTHING

    def layer(i: int) -> Part:
        own = attention(c, qkv_bias=bias, out_bias=bias, qk_norms="head", window=window_of(c, types[i])) + gates
        return pre_norm(c, convolution if types[i] == "conv" else own, mlp, after, names=("operator_norm", "ffn_norm"))

    return decoder(c, layer, last_norm="embedding_norm")


def recurrent_gemma(c: Fields) -> Part:
    """A gated linear recurrence, or attention to a window, in a repeated pattern of layers."""
    hidden, pattern, inner = c.hidden_size, c.block_types, c.intermediate_size // 2
    channels = hidden if c.lru_width is None else c.lru_width
    heads, width, block = c.num_attention_heads, c.conv1d_width, channels // c.num_attention_heads
    own = attention(c, "temporal_block", qkv_bias=c.attention_bias, out_bias=True, window=c.attention_window_size)
    unit = plain("recurrent_param", channels)
    for name in ("input_gate", "recurrent_gate"):
        unit += plain(f"{name}_weight", heads, block, block) + plain(f"{name}_bias", heads, block)
    recurrent = linear("linear_x", hidden, channels, True) + linear("linear_y", hidden, channels, True)
    recurrent += linear("linear_out", channels, hidden, True) + unit.under("rg_lru")
    recurrent += plain("conv_1d", channels, 1, width) + plain("conv_1d.bias", channels)
    mixer = recurrent.under("temporal_block") + state_cache(c, (channels, width), (channels,))
    mlp, names = gated_mlp(c, "mlp_block", inner, bias=True), ("temporal_pre_norm", "channel_pre_norm")
    return decoder(
        c,
        lambda i: pre_norm(c, own if pattern[i % len(pattern)] == "attention" else mixer, mlp, names=names),
        last_norm="final_norm",
    )


def olmo_hybrid(c: Fields) -> Part:
    """The gated delta rule after norms; by default, attention before norms in every fourth layer."""
    hidden, count, width = c.hidden_size, c.num_hidden_layers, c.linear_conv_kernel_dim
    types = kinds(c, lambda i: "full_attention" if i % 4 == 3 or i + 1 == count < 4 else "linear_attention")
    heads, value_heads = (each or c.num_attention_heads for each in (c.linear_num_key_heads, c.linear_num_value_heads))
    key_dim = c.linear_key_head_dim or int(0.75 * hidden / heads)
    value_dim = c.linear_value_head_dim or 2 * key_dim
    keys, values = heads * key_dim, value_heads * value_dim
    own = plain("dt_bias", value_heads) + plain("A_log", value_heads) + norm("o_norm", value_dim)
    for name, size in (("q", keys), ("k", keys), ("v", values)):
        own += linear(f"{name}_proj", hidden, size) + plain(f"{name}_conv1d", size, 1, width)
    own += linear("g_proj", hidden, values) + linear("o_proj", values, hidden)
    own += linear("b_proj", hidden, value_heads) + linear("a_proj", hidden, value_heads)
    state = (value_heads, key_dim, value_dim)
    recurrent = pre_norm(c, own.under("linear_attn") + state_cache(c, (2 * keys + values, width), state), gated_mlp(c))
    attending = attention(c, qkv_bias=c.attention_bias, out_bias=c.attention_bias, qk_norms="all") + gated_mlp(c)
    attending += norms(hidden, "post_attention_layernorm", "post_feedforward_layernorm")
    return decoder(c, lambda i: recurrent if types[i] == "linear_attention" else attending)
